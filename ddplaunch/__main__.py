"""``python -m ddplaunch`` is ``ddplaunch``."""

import sys

if not getattr(sys.flags, "safe_path", False):
    sys.path.append(sys.path.pop(0))  # the current folder's json.py is the program's and not ours

from ddplaunch.cli import main

main()
