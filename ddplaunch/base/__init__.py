"""What all packages use: the event loop, errors, text, files, sockets, terminals, options, message types.

Every package may import this one; it imports only the standard library, msgspec and click. A change here reaches all of
them, so its tests are `tests/base`.
"""

import os

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of the package ``ddplaunch``."""
