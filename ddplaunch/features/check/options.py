"""The options of the check before an attempt: ``--check``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options
from ddplaunch.core.option_values import seconds

DEFAULT_GPU_MEMORY_TIMEOUT_S = 30.0


# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Checking(OptionGroup, frozen=True):
    """The check of every node before an attempt."""

    heading = "Starting ranks"
    after = "warm"

    check: Annotated[bool, Option("--check",
        "Check disks, memory and GPUs of every node before each attempt. An elastic job excludes nodes that fail.",
        in_project=True)] = False
    gpu_memory_timeout: Annotated[float | None, Option("--gpu-memory-timeout TIME",
        "With --check: how long to wait for GPU memory that is still in use.  "
        f"[default: {DEFAULT_GPU_MEMORY_TIMEOUT_S:g}]", seconds, in_project=True)] = None

    @property
    def gpu_memory_timeout_s(self) -> float:
        return DEFAULT_GPU_MEMORY_TIMEOUT_S if self.gpu_memory_timeout is None else self.gpu_memory_timeout

    def check_contradictions(self, options: Options) -> None:
        if self.gpu_memory_timeout is not None and not self.check:
            raise UsageError(f"--gpu-memory-timeout {self.gpu_memory_timeout:g} works only with --check", "add --check")
