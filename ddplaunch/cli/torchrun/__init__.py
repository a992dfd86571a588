"""The words of torchrun and their meaning here."""
