"""What one process can import for all ranks: what is known to be safe before the ranks are forked."""
