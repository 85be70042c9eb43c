"""The library as its users meet it; inside, specs and reports are made and read without this."""
