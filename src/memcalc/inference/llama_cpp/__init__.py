"""What llama.cpp allocates."""
