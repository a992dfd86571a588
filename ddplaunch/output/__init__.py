"""What the ranks print, on its way to people and files."""
