"""Entry point, also of ``python -m ddplaunch``; a ``json.py`` in the current folder must not shadow Python's."""

import os
import sys

try:
    # The current folder is moved to the end, not removed, as PYTHONPATH may contain it.
    sys.path.sort(key=lambda path: os.path.realpath(path) == os.getcwd())
except OSError:  # the current folder was deleted, which is reported later
    pass

try:
    from ddplaunch.cli import main
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.exit(130)

if __name__ == "__main__":
    main()
