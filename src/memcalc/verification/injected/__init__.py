"""What runs inside the user's script."""
