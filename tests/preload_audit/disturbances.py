"""Actions of a program before an import that must not change an order-free package.

Standard library only; run from its path, inside the interpreters of an audit.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


TERMINAL = "a terminal"


def torch_defaults(extra: str) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_default_device"):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("high")


def logging_setup(extra: str) -> None:
    import io
    import logging

    class Handler(logging.StreamHandler[io.StringIO]):
        def emit(self, record: logging.LogRecord) -> None:
            LOGGED.append(record.name)

    handler = Handler(io.StringIO())
    logging.root.addHandler(handler)
    logging.root.setLevel(1)


LOGGED: list[str] = []
"""The loggers whose records reached the program's handler."""


def python_settings(extra: str) -> None:
    """Change what belongs to Python, all at once: each disturbance costs an interpreter."""
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
    sys.path.append(extra)


def terminal(extra: str) -> None:
    """Give the process a terminal as stdin, stdout and stderr, whose output goes nowhere."""
    ours, theirs = os.openpty()
    if os.fork() == 0:
        try:
            os.close(theirs)
            while os.read(ours, 1 << 16):
                pass
        finally:  # OSError: the other end is closed
            os._exit(0)
    os.close(ours)
    for fd in range(3):
        os.dup2(theirs, fd)
    os.close(theirs)


def working_folder(extra: str) -> None:
    os.chdir(extra)


DISTURBANCES: dict[str, Callable[[str], None]] = {
    "torch's settings": torch_defaults,
    "logging": logging_setup,
    "the working folder": working_folder,
    "Python's settings": python_settings,
    TERMINAL: terminal,
}
"""By what they change; called with a folder in which there is nothing."""
