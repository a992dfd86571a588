"""Perturbations: actions of a program before an import that must not change an order-free package.

Standard library only; loaded by its path in the interpreters of an audit.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


TERMINAL = "a terminal"


def change_torch_settings(empty_folder: str) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_default_device"):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("high")


def set_up_logging(empty_folder: str) -> None:
    import io
    import logging

    class Handler(logging.StreamHandler[io.StringIO]):
        def emit(self, record: logging.LogRecord) -> None:
            LOGGERS.append(record.name)

    handler = Handler(io.StringIO())
    logging.root.addHandler(handler)
    logging.root.setLevel(1)


LOGGERS: list[str] = []
"""The loggers whose records reached the program's handler."""


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
    "torch's settings": change_torch_settings,
    "logging": set_up_logging,
    "the working folder": os.chdir,
    "Python's settings": change_python_settings,
    TERMINAL: open_terminal,
}
"""By what they change; called with the path of an empty folder."""
