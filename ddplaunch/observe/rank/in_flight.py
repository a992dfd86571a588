"""Records the exception that the main thread handles, say in a long ``finally``: the rank may be killed there.

It runs in ranks, by the rules of ``core/rank/rank_runner.py``. ``node/in_flight.py`` reads the file, and decides if the
exception goes on to the callers or was caught.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddplaunch.core.rank import rank_exit
    from ddplaunch.core.rank.rank_runner import load_private_module
else:
    rank_exit = load_private_module("core/rank/rank_exit")

MAX_EXCEPTIONS = 8  # of a chain of exceptions, each raised while the next one was handled
_MAX_FRAMES = 100


class HandledExceptionWriter:
    """Writes the exception that the main thread handles to a file, and removes the file when none is handled."""

    def __init__(self, path: str, main_thread: int) -> None:
        self._path, self._main, self._pid = path, main_thread, os.getpid()
        self._text = ""

    def note(self) -> None:
        """Write or remove the file; called from another thread, or in the main thread between two instructions."""
        try:
            found = sys._current_exceptions().get(self._main)  # type: ignore[attr-defined, unused-ignore]
            error = found[1] if isinstance(found, tuple) else found
            described = _describe_chain(error if isinstance(error, BaseException) else None, get_ident() == self._main)
            text = "\n".join(map(rank_exit.to_json, described))
            if text == self._text or os.getpid() != self._pid:
                return
            self._text = text
            if text:
                with open(f"{self._path}.new", "w", encoding="ascii") as file:
                    file.write(text)
                os.rename(f"{self._path}.new", self._path)
            else:
                os.unlink(self._path)
        except Exception:
            pass  # the disk is full, or a __str__ fails


def _describe_chain(error: BaseException | None, in_main: bool) -> list[dict[str, object]]:
    """Describe an exception and its ``__context__`` chain.

    ``in_main``: called in the main thread, where the user's code (``__str__``) must not run: it may need a held lock.
    """
    described: list[dict[str, object]] = []
    while error is not None and len(described) < MAX_EXCEPTIONS:
        trace, frames = error.__traceback__, ["Traceback (most recent call last):"]
        if isinstance(error, Exception) and trace is not None:
            handler = trace.tb_frame
            location = {"file": handler.f_code.co_filename, "line": handler.f_lineno or 0}
            while trace is not None and len(frames) < _MAX_FRAMES:
                code = trace.tb_frame.f_code
                frames.append(f'  File "{code.co_filename}", line {trace.tb_lineno}, in {code.co_name}')
                trace = trace.tb_next
            name, message = type(error).__name__, "" if in_main and not _is_safe_to_format(error) else str(error)
            message = f"{name}: {message}" if message else name
            described.append({**location, "message": message, "traceback": "\n".join([*frames, message])})
        error = error.__context__
    return described


def _is_safe_to_format(error: Exception) -> bool:
    """Whether ``str`` of the exception runs no code of the program."""
    plain = (bool, bytes, float, int, str, type(None))
    return type(type(error).__str__) is type(object.__str__) and all(type(each) in plain for each in error.args)
