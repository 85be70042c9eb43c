"""`--generic`: a Llama-like config read off names and shapes."""
