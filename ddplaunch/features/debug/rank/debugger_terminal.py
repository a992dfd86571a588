"""A pseudo-terminal for debuggers that need one (ipdb, pudb, IPython), during each of their stops.

The launcher opens it, and relays its output to the user. It replaces the rank's stdin, stdout and stderr from a stop
until the rank continues; output of the program in between goes to the rank's own streams.
"""

from __future__ import annotations

import _thread
import os
import sys
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    from ddplaunch.features.debug.rank.rank_debugger import Debugger


class TerminalDetached(BaseException):
    """Raised in the main thread when the user has detached from the terminal."""


class DebuggerTerminal:
    """The terminal of one rank that its debugger uses while the rank is stopped."""

    def __init__(self, debugger: Debugger) -> None:
        self._debugger, self._connection = debugger, debugger.connection
        self._streams: list[int] = []  # the rank's own stdin, stdout and stderr, while they are redirected
        self._term: str | None = None

    def stop(self, name: str, function: Callable[..., Any], frame: FrameType, *args: Any, **named: Any) -> None:
        """Call a debugger's stop function, such as ``set_trace``, for ``frame``; ``name``: the debugger's."""
        debugger = self._debugger
        if debugger.holder == _thread.get_ident():
            return _call_in_frame(name, function, frame, args, named) if self._streams else None
        with debugger.lock:
            if not self._connection.connect() or not self._redirect_streams():
                return None
            try:
                if name == "IPython":  # has no tracer, but a call that returns when the rank continues
                    return self._run_debugger(lambda: _call_in_frame(name, function, frame, args, named), name, frame)
                _call_in_frame(name, function, frame, args, named)
            finally:
                traces = sys.gettrace()
                sys.settrace(None)
                self._restore_streams()
        tracer = getattr(traces, "__self__", None)
        if hasattr(tracer, "interaction") and "interaction" not in vars(tracer):
            self._patch_tracer(name, tracer)
        sys.settrace(traces)
        return None

    def interrupt_if_detached(self) -> None:
        """Raise TerminalDetached in the main thread if the user has detached while a debugger waits for input."""
        if self._streams and not self._connection.connect():
            raise TerminalDetached

    def _patch_tracer(self, name: str, tracer: Any) -> None:
        """Make a debugger use the terminal at each later stop, and never stop in ddplaunch's code."""
        interact, stop_here = tracer.interaction, tracer.stop_here

        def interaction(frame: Any, *args: Any, **named: Any) -> None:
            debugger = self._debugger
            if debugger.holder == _thread.get_ident():
                return interact(frame, *args, **named)  # type: ignore[no-any-return]
            if os.getpid() != debugger.pid:
                return tracer.set_continue()  # type: ignore[no-any-return]
            with debugger.lock:
                if self._connection.connect() and self._redirect_streams():
                    self._run_debugger(lambda: interact(frame, *args, **named), name, frame, tracer)
                else:
                    tracer.set_continue()

        tracer.interaction = interaction
        tracer.stop_here = lambda frame: not self._debugger.is_ours(frame) and stop_here(frame)

    def _run_debugger(self, interact: Callable[[], object], name: str, frame: FrameType, tracer: Any = None) -> None:
        """Run the debugger's dialog for one stop, and report the stop and its end to the launcher."""
        debugger, connection = self._debugger, self._connection
        debugger.holder = _thread.get_ident()
        connection.send("RankStopped", tool=name, **debugger.stop_location(frame))
        try:
            interact()
        except BaseException:
            if connection.connect():
                raise
        finally:
            self._restore_streams()
            debugger.holder = 0
            if tracer is not None and not connection.connect():
                tracer.quitting = False
                tracer.set_continue()
            elif tracer is not None and tracer.quitting:
                connection.send("QuitRequested")
                connection.wait_for_release()
            connection.send_resumed(steps=tracer is not None and tracer.stoplineno != -1)

    def _redirect_streams(self) -> bool:
        """Redirect stdin, stdout and stderr to the terminal; return False if there is none."""
        try:
            fd = os.open(self._connection.request_terminal(), os.O_RDWR | os.O_NOCTTY)
        except OSError:
            return False
        _flush_streams()
        self._streams = [os.dup(number) for number in range(3)]
        for number in range(3):
            os.dup2(fd, number)
        os.close(fd)
        self._term = os.environ.get("TERM")
        if self._term in (None, "", "dumb"):  # as in a batch job
            os.environ["TERM"] = "xterm-256color"
        return True

    def _restore_streams(self) -> None:
        """Restore the rank's own streams."""
        if not self._streams:
            return
        if not _flush_streams():  # the terminal is gone: discard the rest
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            os.close(devnull)
            _flush_streams()
        for number, own in enumerate(self._streams):
            os.dup2(own, number)
            os.close(own)
        self._streams = []
        os.environ.pop("TERM", None)
        if self._term is not None:
            os.environ["TERM"] = self._term


def _call_in_frame(name: str, function: Callable[..., Any], frame: FrameType, args: Any, named: Any) -> None:
    """Call the debugger's stop function as if from ``frame``: pudb and IPython use their caller's frame."""
    if name == "pudb":
        sys.modules["pudb"]._get_debugger().set_trace(frame, **named)
    elif name == "IPython":
        eval("_embed()", frame.f_globals, {**frame.f_locals, "_embed": partial(function, *args, **named)})
    else:
        function(frame, *args, **named)


def _flush_streams() -> bool:
    """Flush stdout and stderr; return whether both were flushed."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the stream is closed, or its terminal is gone
            flushed = False
    return flushed
