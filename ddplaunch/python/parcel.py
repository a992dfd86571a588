"""Objects on their way between a caller and its ranks: pickles in a folder of the user's own.

Functions and classes that cannot be imported (a notebook's, a script's, lambdas, closures) travel by value, as
cloudpickle has it. The memory of big tensors is a file beside the pickle, which the reader maps.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import sys
from typing import Any

import cloudpickle

_BIG = 1 << 20  # bytes of a tensor's memory, from which on a file of its own pays


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, path: str) -> None:
        super().__init__(file, protocol=5)
        self._path, self._files = path, 0

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.storage.TypedStorage:
            untyped = value._untyped_storage.cpu()  # the caller need not have the rank's GPU
            if untyped.nbytes() >= _BIG:
                self._files += 1
                path = f"{self._path}-{self._files}"
                _write(path, (ctypes.c_char * untyped.nbytes()).from_address(untyped.data_ptr()))
                return _mapped, (path, untyped.nbytes(), value.dtype)
            if value._untyped_storage.device.type != "cpu":
                return _on_cpu, (bytes(untyped), value.dtype)
        return super().reducer_override(value)


def _write(path: str, data: Any) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _mapped(path: str, size: int, dtype: Any) -> Any:
    """The memory of a tensor, mapped: what is written to it stays in this process."""
    import torch

    untyped = torch.UntypedStorage.from_file(path, shared=False, nbytes=size)
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _on_cpu(data: bytes, dtype: Any) -> Any:
    import torch

    untyped = torch.UntypedStorage(len(data))
    ctypes.memmove(untyped.data_ptr(), data, len(data))
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def dump(value: object, path: str) -> None:
    """Write an object to a file that appears whole.

    Raises:
        pickle.PicklingError, TypeError, AttributeError and others: it cannot be pickled.
        OSError: it cannot be written.
    """
    pickled = io.BytesIO()
    _Pickler(pickled, path).dump(value)
    part = f"{path}.part"
    _write(part, pickled.getbuffer())
    os.rename(part, path)


def load(path: str) -> Any:
    """Read an object that ``dump`` has written."""
    with open(path, "rb") as file:
        return pickle.load(file)
