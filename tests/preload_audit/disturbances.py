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

VARIABLES = {
    "DEBUG": "1",
    "VERBOSE": "1",
    "LOG_LEVEL": "DEBUG",
    "LOGLEVEL": "DEBUG",
    "CI": "true",
    "TESTING": "1",
    "PROFILE": "1",
    "DISABLE_TELEMETRY": "1",
    "FOO": "bar",
}
"""Variables as a program may set them; those that a package reads are listed, and not set here."""


def torch_defaults(extra: str) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_default_device"):
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("high")


def seeds(extra: str) -> None:
    import random

    random.seed(4711)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(4711)
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "manual_seed"):
        torch.manual_seed(4711)


def warning_filters(extra: str) -> None:
    import warnings

    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", category=FutureWarning)


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


def decimal_context(extra: str) -> None:
    import decimal

    decimal.getcontext().prec = 5
    decimal.DefaultContext.prec = 6


def locale(extra: str) -> None:
    import locale

    for name in ("de_DE.UTF-8", "C" if "UTF" in locale.setlocale(locale.LC_ALL).upper() else "C.UTF-8"):
        try:
            locale.setlocale(locale.LC_ALL, name)
        except locale.Error:
            continue
        return


def working_folder(extra: str) -> None:
    os.chdir(extra)


def arguments(extra: str) -> None:
    sys.argv[:] = ["other.py", "--debug", "-v", "--verbose", "--test"]


def search_path(extra: str) -> None:
    sys.path.append(extra)
    sys.path.insert(1, os.path.join(extra, "lib"))


DISTURBANCES: dict[str, Callable[[str], None]] = {
    "torch's settings": torch_defaults,
    "seeds": seeds,
    "warning filters": warning_filters,
    "logging": logging_setup,
    "decimal's context": decimal_context,
    "the locale": locale,
    "the working folder": working_folder,
    "sys.argv": arguments,
    "sys.path": search_path,
}
"""By what they change; called with a folder in which there is nothing."""
