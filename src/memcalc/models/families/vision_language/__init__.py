"""A vision tower in front of a decoder."""
