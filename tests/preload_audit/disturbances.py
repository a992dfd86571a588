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


def working_folder(extra: str) -> None:
    os.chdir(extra)


DISTURBANCES: dict[str, Callable[[str], None]] = {
    "torch's settings": torch_defaults,
    "logging": logging_setup,
    "the working folder": working_folder,
}
"""By what they change; called with a folder in which there is nothing."""
