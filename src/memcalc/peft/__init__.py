"""What PEFT adds to the layers of a frozen model."""
