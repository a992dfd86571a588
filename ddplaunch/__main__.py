"""``ddplaunch``, and ``python -m ddplaunch``: the current folder's ``json.py`` is the program's, not ours."""

import gc
import os
import sys

gc.set_threshold(100_000)  # objects: what is imported is no garbage, and looking for some takes 5 % of a start

try:
    sys.path.sort(key=lambda path: os.path.realpath(path) == os.getcwd())  # behind all others; PYTHONPATH may name it
except OSError:  # it is gone, which is said later
    pass

from ddplaunch.cli import main  # noqa: E402, the above is for it

if __name__ == "__main__":
    main()
