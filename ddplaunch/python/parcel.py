"""Objects on their way between a caller and its ranks: pickles in a folder of the user's own.

Functions and classes that cannot be imported (a notebook's, a script's, lambdas, closures) travel by value, as
cloudpickle has it. The memory of big tensors and arrays (the out-of-band buffers of PEP 574) is a file beside the
pickle, which the reader maps. The source of a notebook's cell is a file too, so that tracebacks can show its lines.
"""

from __future__ import annotations

import ctypes
import io
import linecache
import mmap
import os
import pickle
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle

from ddplaunch.errors import LaunchError, sanitize_line

_MIN_MAPPED_BYTES = 1 << 20  # bytes of a tensor's or an array's memory, from which on a file of its own pays


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, path: str) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._keep_in_band)
        self._path = path
        self.files: list[str] = []
        """All files beside the pickle."""
        self.buffers: list[str] = []
        """Those that hold out-of-band buffers, in order."""

    def _write_beside(self, memory: Any) -> str:
        self.files.append(f"{self._path}-{len(self.files) + 1}")
        _write_atomic(self.files[-1], memory)
        return self.files[-1]

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Write a large buffer to a file of its own; a small one stays in the pickle."""
        memory = buffer.raw()
        if memory.nbytes < _MIN_MAPPED_BYTES:
            return True
        self.buffers.append(self._write_beside(memory))
        return False

    def reducer_override(self, value: Any) -> Any:
        if type(value) is CodeType and (path := self._source(value.co_filename)):
            return _same, (value.replace(co_filename=path),)
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.storage.TypedStorage:
            untyped = value._untyped_storage.cpu()  # the caller need not have the rank's GPU
            if untyped.nbytes() >= _MIN_MAPPED_BYTES:
                path = self._write_beside((ctypes.c_char * untyped.nbytes()).from_address(untyped.data_ptr()))
                return _map_storage, (path, untyped.nbytes(), value.dtype)
            if value._untyped_storage.device.type != "cpu":
                return _on_cpu, (bytes(untyped), value.dtype)
        return super().reducer_override(value)

    def _source(self, name: str) -> str | None:
        """Write the source that is known only to this process to a file; None where there is a file already."""
        if os.path.exists(name) or not (lines := linecache.getlines(name)):
            return None
        path = os.path.join(os.path.dirname(self._path), os.path.basename(name))
        if not os.path.exists(path):
            _write_atomic(path, "".join(lines).encode(errors="backslashreplace"))
        return path


def _same(code: CodeType) -> CodeType:
    return code


def _write_atomic(path: str, data: Any) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _map_storage(path: str, size: int, dtype: Any) -> Any:
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
    """Write an object to a file that appears complete.

    Raises:
        pickle.PicklingError, TypeError, AttributeError and others: it cannot be pickled.
        OSError: it cannot be written.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, path)
    try:
        pickler.dump(value)
    except BaseException:
        for each in pickler.files:
            os.unlink(each)
        raise
    part = f"{path}.part"
    _write_atomic(part, pickle.dumps(pickler.buffers) + pickled.getbuffer())
    os.rename(part, path)


def dump_call(function: Callable[..., object], args: tuple[object, ...], path: str) -> None:
    """Write a function and its arguments to a file; LaunchError names what cannot be pickled."""
    try:
        dump((function, args), path)
    except OSError:
        raise
    except Exception as error:
        parts: dict[str, object] = {getattr(function, "__name__", "the function"): function}
        parts |= {f"argument {number} ({type(each).__name__})": each for number, each in enumerate(args, 1)}
        raise unpicklable(parts, error) from None


class UnpicklableError(LaunchError):
    """A function or an argument cannot be pickled."""


def unpicklable(values: dict[str, object], error: Exception) -> UnpicklableError:
    """The error for the first of ``values`` that cannot be pickled, by its name."""
    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception as own:
            return UnpicklableError(f"{name} cannot be sent to the ranks: {sanitize_line(str(own))}")
    return UnpicklableError(f"the call cannot be sent to the ranks: {sanitize_line(str(error))}")


def load(path: str) -> Any:
    """Read an object that ``dump`` has written."""
    with open(path, "rb") as file:
        buffers = [_map(each) for each in pickle.load(file)]
        return pickle.load(file, buffers=buffers)


def _map(path: str) -> mmap.mmap:
    """A file's content as private memory: what is written to it stays in this process."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
