"""The Hugging Face Hub over HTTP, cached and bounded."""
