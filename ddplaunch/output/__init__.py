"""What ranks print and what happens, on its way to people and files."""
