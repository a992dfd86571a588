"""The part of ``--torch-debug`` in the ranks."""
