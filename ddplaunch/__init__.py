"""ddplaunch: a launcher for PyTorch distributed training."""

__version__ = "0.1.0"

TYPE_CHECKING = False
"""What ``typing.TYPE_CHECKING`` is: to load typing takes 3 ms, and a start needs none of it."""
