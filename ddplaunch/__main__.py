"""Entry point, also of ``python -m ddplaunch``; a ``json.py`` in the current folder must not shadow Python's."""

import os
import sys

try:
    # moved to the end, as PYTHONPATH may contain it
    sys.path.sort(key=lambda path: os.path.realpath(path) == os.getcwd())
except OSError:  # the current folder was deleted, which is reported later
    pass

from ddplaunch.cli import main

if __name__ == "__main__":
    main()
