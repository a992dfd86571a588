"""``Task`` under its former name, for programs that import it and jobs that were pickled with it."""

from __future__ import annotations

import warnings

from ddplaunch.submit.submitit import Task

__all__ = ["Task"]

warnings.warn(
    "ddplaunch.schedulers.submitit has moved: from ddplaunch.submit.submitit import Task",
    DeprecationWarning,
    stacklevel=2,
)
