"""What an optimizer step allocates, written as its source is: pure functions of weight shapes."""
