"""``python -m ddplaunch`` is ``ddplaunch``."""

from ddplaunch.cli import main

main()
