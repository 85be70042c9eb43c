"""What PEFT puts beside the layers of a frozen model."""
