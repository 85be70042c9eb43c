"""The options of a job (training, inference), and which of them exclude each other."""
