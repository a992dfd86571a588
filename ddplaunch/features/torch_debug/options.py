"""The option ``--torch-debug``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.options import Option, OptionGroup


class TorchDebug(OptionGroup, frozen=True):
    """Whether torch's own debug server runs."""

    heading = "Debugging"

    torch_debug: Annotated[bool, Option("--torch-debug",
        "Serve the pages of torch.distributed.debug on 127.0.0.1, from torch 2.11 on.")] = False  # fmt: skip
