"""``ddplaunch``, and ``python -m ddplaunch``: the current folder's ``json.py`` is the program's, not ours."""

import os
import sys

try:
    sys.path.sort(key=lambda path: os.path.realpath(path) == os.getcwd())  # behind all others; PYTHONPATH may name it
except OSError:  # it is gone, which is said later
    pass

from ddplaunch.cli import main

if __name__ == "__main__":
    main()
