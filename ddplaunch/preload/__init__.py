"""What one process can import for all ranks: what the program imports, and what a trial has proven to be clean."""
