"""What all packages use: the event loop, errors, text, files, sockets, terminals, options, message types.

Every package may import this one; it imports only the standard library, msgspec and click. A change here affects all of
them; its tests are in `tests/base`.
"""

import os

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of the package ``ddplaunch``."""
