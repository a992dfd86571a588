"""Serializes objects between a caller and its ranks: pickles in a private folder.

Functions and classes that cannot be imported (of a notebook or a script, lambdas, closures) are pickled by value, by
cloudpickle. The memory of large tensors and arrays (out-of-band buffers of PEP 574) is in files next to the pickle;
the reader maps these files. The source of a notebook's cell is in a file, too, so that tracebacks show its lines.
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
from contextlib import suppress
from types import CodeType
from typing import Any

import cloudpickle

from ddplaunch.base.errors import LaunchError, sanitize_line

_open, _os_open, _rename, _unlink = open, os.open, os.rename, os.unlink  # kept, as the program may replace them

_MIN_MAPPED_BYTES = 1 << 20  # a tensor or array of at least this size gets its own file


class _TensorMemory:
    """The memory of a tensor, as one object, which pickle writes once: torch makes a storage object for each view."""

    def __init__(self, untyped: Any) -> None:
        self.untyped = untyped  # kept, so that no other memory gets its address meanwhile


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, path: str) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._on_buffer)
        self._path = path
        self.files: list[str] = []
        """The paths of all files besides the pickle."""
        self.buffers: list[str] = []
        """The paths of the files with out-of-band buffers, in order."""
        self._memories: dict[tuple[int, int, str], _TensorMemory] = {}
        """The memory of tensors, by address, size and device: views are stored once, and share it afterwards."""

    def _write_memory_file(self, memory: Any) -> str:
        self.files.append(f"{self._path}-{len(self.files) + 1}")
        _write_new_file(self.files[-1], memory)
        return self.files[-1]

    def _on_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """The buffer callback: write a large buffer to its own file and return False; a small one stays in-band."""
        memory = buffer.raw()
        if memory.nbytes < _MIN_MAPPED_BYTES:
            return True
        self.buffers.append(self._write_memory_file(memory))
        return False

    def reducer_override(self, value: Any) -> Any:
        if type(value) is CodeType:  # cloudpickle 3.1.3 drops the name of its file
            make, parts = self.dispatch_table[CodeType](value)
            return _make_code, (self._write_source(value.co_filename) or value.co_filename, make, parts)
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.storage.TypedStorage:
            memory, untyped = _TensorMemory(value._untyped_storage), value._untyped_storage
            if address := untyped.data_ptr():  # the address of an empty tensor is 0
                memory = self._memories.setdefault((address, untyped.nbytes(), str(untyped.device)), memory)
            return _type_storage, (memory, value.dtype)
        if type(value) is _TensorMemory:
            untyped = value.untyped.cpu()  # the caller may have no such GPU
            if untyped.nbytes() >= _MIN_MAPPED_BYTES:
                path = self._write_memory_file((ctypes.c_char * untyped.nbytes()).from_address(untyped.data_ptr()))
                return _map_memory, (path, untyped.nbytes())
            return _copy_memory, (ctypes.string_at(untyped.data_ptr(), untyped.nbytes()),)
        return super().reducer_override(value)

    def _write_source(self, name: str) -> str | None:
        """Write source that only linecache has to a file, and return its path; None if it has a file or is unknown."""
        if os.path.exists(name) or not (lines := linecache.getlines(name)):
            return None
        path = os.path.join(os.path.dirname(self._path), os.path.basename(name))
        if not os.path.exists(path):
            _write_new_file(path, "".join(lines).encode(errors="backslashreplace"))
        return path


def _make_code(file_name: str, make: Callable[..., CodeType], parts: tuple[object, ...]) -> CodeType:
    return make(*parts).replace(co_filename=file_name)


def _write_new_file(path: str, data: Any) -> None:
    """Write a private file, which must not exist."""
    with _open(_os_open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)


def _map_memory(path: str, size: int) -> Any:
    """Map a tensor's memory from a file; writes stay private to this process."""
    import torch

    return torch.UntypedStorage.from_file(path, shared=False, nbytes=size)


def _copy_memory(data: bytes) -> Any:
    import torch

    untyped = torch.UntypedStorage(len(data))
    ctypes.memmove(untyped.data_ptr(), data, len(data))
    return untyped


def _type_storage(untyped: Any, dtype: Any) -> Any:
    torch = sys.modules["torch"]  # the function that made ``untyped`` has imported it
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def dump(value: object, path: str) -> None:
    """Write an object to a file, atomically.

    Raises:
        pickle.PicklingError, TypeError, AttributeError and others: the object cannot be pickled.
        OSError: the file cannot be written.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, path)
    part = f"{path}.part"
    try:
        pickler.dump(value)
        _write_new_file(part, pickle.dumps(pickler.buffers) + pickled.getbuffer())
        _rename(part, path)
    except BaseException:
        for each in (*pickler.files, part):
            with suppress(FileNotFoundError):
                _unlink(each)
        raise


def dump_call(function: Callable[..., object], args: tuple[object, ...], path: str) -> None:
    """Write a function and its arguments to a file; raises UnpicklableError, which names the culprit."""
    try:
        dump((function, args), path)
    except OSError:
        raise
    except Exception as error:
        parts: dict[str, object] = {getattr(function, "__name__", "the function"): function}
        parts |= {f"argument {number} ({type(each).__name__})": each for number, each in enumerate(args, 1)}
        raise make_unpicklable_error(parts, error) from None


class UnpicklableError(LaunchError):
    """A function or an argument cannot be pickled."""


def make_unpicklable_error(values: dict[str, object], error: Exception) -> UnpicklableError:
    """The error that names the first of ``values`` that cannot be pickled."""
    for name, value in values.items():
        try:
            cloudpickle.dumps(value)
        except Exception as own:
            return UnpicklableError(f"{name} cannot be sent to the ranks: {sanitize_line(str(own))}")
    return UnpicklableError(f"the call cannot be sent to the ranks: {sanitize_line(str(error))}")


def load(path: str) -> Any:
    """Read an object written by ``dump``."""
    with _open(path, "rb") as file:
        buffers = [_map_file(each) for each in pickle.load(file)]
        return pickle.load(file, buffers=buffers)


def _map_file(path: str) -> mmap.mmap:
    """Map a file copy-on-write: writes stay private to this process."""
    with _open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
