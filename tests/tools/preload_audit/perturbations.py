"""Perturbations: actions of a program before an import that a rank does not check, and that must not change a package.

Standard library only; loaded by its path in the interpreters of an audit.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


TERMINAL = "a terminal"


def set_up_logging(empty_folder: str) -> None:
    import io
    import logging

    logging.root.addHandler(logging.StreamHandler(io.StringIO()))
    logging.root.setLevel(1)


def change_python_settings(empty_folder: str) -> None:
    """Change settings of Python, all at once: each perturbation costs an interpreter."""
    import contextlib
    import decimal
    import locale
    import random
    import warnings

    random.seed(4711)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(4711)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=FutureWarning)
    decimal.getcontext().prec = 5
    decimal.DefaultContext.prec = 6
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "C" if "UTF" in locale.setlocale(locale.LC_ALL).upper() else "C.UTF-8")
    sys.setrecursionlimit(1234)
    sys.path.append(empty_folder)


def open_terminal(empty_folder: str) -> None:
    """Make stdin, stdout and stderr a terminal, whose output is discarded."""
    controller, terminal = os.openpty()
    if os.fork() == 0:
        try:
            os.close(terminal)
            while os.read(controller, 1 << 16):
                pass
        finally:  # OSError: the other end is closed
            os._exit(0)
    os.close(controller)
    for fd in range(3):
        os.dup2(terminal, fd)
    os.close(terminal)


PERTURBATIONS: dict[str, Callable[[str], None]] = {
    "logging": set_up_logging,
    "Python's settings": change_python_settings,
    TERMINAL: open_terminal,
}
"""By what they change; called with the path of an empty folder."""
