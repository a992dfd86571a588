"""A fake torch with CUDA for ``--oom-report``: a GPU of 79 GiB, an allocator with a history."""

import pickle  # noqa: F401, as torch does

from torch import _C, cuda, version  # noqa: F401

__version__ = version.__version__


class OutOfMemoryError(RuntimeError):
    pass


class default_generator:
    @staticmethod
    def seed():
        return 0
