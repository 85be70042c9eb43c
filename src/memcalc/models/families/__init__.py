"""One folder a kind of family, one file a family and its variants; `models/registry.py` lists them."""
