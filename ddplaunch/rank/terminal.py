"""Debuggers that need a terminal (ipdb, pudb, IPython): in a rank they have one of their own while they ask.

The launcher makes it, and passes on to a person what is drawn there. It is the rank's stdin, stdout and stderr from a
stop to the next line, and what the program prints in between goes where it always goes.
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

    from ddplaunch.rank.debugger import Debugger


class TerminalDetached(BaseException):
    """Nobody is at the terminal any more."""


class DebuggerTerminal:
    """The terminal of one rank."""

    def __init__(self, debugger: Debugger) -> None:
        self._debugger, self._talk = debugger, debugger.connection
        self._streams: list[int] = []  # the rank's own, while the terminal stands in their place
        self._term: str | None = None

    def stop(self, name: str, function: Callable[..., Any], frame: FrameType, *args: Any, **named: Any) -> None:
        """Call what a program calls to be stopped at ``frame``; ``name`` is that of the debugger."""
        debugger = self._debugger
        if debugger.holder == _thread.get_ident():
            return _call_in_frame(name, function, frame, args, named) if self._streams else None
        with debugger.lock:
            if not self._talk.connect() or not self._redirect_streams():
                return None
            try:
                if name == "IPython":  # no tracer, but a call that returns when the rank goes on
                    return self._run_debugger(lambda: _call_in_frame(name, function, frame, args, named), name, frame)
                _call_in_frame(name, function, frame, args, named)
            finally:
                traces = sys.gettrace()
                sys.settrace(None)
                self._restore_streams()
        tracer = getattr(traces, "__self__", None)
        if hasattr(tracer, "interaction") and "interaction" not in vars(tracer):
            self._prepare(name, tracer)
        sys.settrace(traces)
        return None

    def interrupt_if_detached(self) -> None:
        """Raise Left in the main thread if nobody is there any more, and a debugger still asks."""
        if self._streams and not self._talk.connect():
            raise TerminalDetached

    def _prepare(self, name: str, tracer: Any) -> None:
        """Have a debugger ask on our terminal whenever it stops, and never in our own code."""
        interact, stop_here = tracer.interaction, tracer.stop_here

        def interaction(frame: Any, *args: Any, **named: Any) -> None:
            debugger = self._debugger
            if debugger.holder == _thread.get_ident():
                return interact(frame, *args, **named)  # type: ignore[no-any-return]
            if os.getpid() != debugger.pid:
                return tracer.set_continue()  # type: ignore[no-any-return]
            with debugger.lock:
                if self._talk.connect() and self._redirect_streams():
                    self._run_debugger(lambda: interact(frame, *args, **named), name, frame, tracer)
                else:
                    tracer.set_continue()

        tracer.interaction = interaction
        tracer.stop_here = lambda frame: not self._debugger.is_ours(frame) and stop_here(frame)

    def _run_debugger(self, asks: Callable[[], object], name: str, frame: FrameType, tracer: Any = None) -> None:
        debugger, talk = self._debugger, self._talk
        debugger.holder = _thread.get_ident()
        talk.send("RankStopped", tool=name, **debugger.stop_location(frame))
        try:
            asks()
        except BaseException:
            if talk.connect():
                raise
        finally:
            self._restore_streams()
            debugger.holder = 0
            if tracer is not None and not talk.connect():
                tracer.quitting = False
                tracer.set_continue()
            elif tracer is not None and tracer.quitting:
                talk.send("QuitRequested")
                talk.wait_for_release()
            talk.send_resumed(steps=tracer is not None and tracer.stoplineno != -1)

    def _redirect_streams(self) -> bool:
        """Put the terminal in the place of our streams; where there is none, that fails."""
        try:
            fd = os.open(self._talk.request_terminal(), os.O_RDWR | os.O_NOCTTY)
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
        """Give the rank its own streams back."""
        if not self._streams:
            return
        if not _flush_streams():  # it has gone: what is left is for nobody
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.close(nowhere)
            _flush_streams()
        for number, own in enumerate(self._streams):
            os.dup2(own, number)
            os.close(own)
        self._streams = []
        os.environ.pop("TERM", None)
        if self._term is not None:
            os.environ["TERM"] = self._term


def _call_in_frame(name: str, function: Callable[..., Any], frame: FrameType, args: Any, named: Any) -> None:
    """Call it as if the frame had: pudb and IPython look for the frame that they are called from."""
    if name == "pudb":
        sys.modules["pudb"]._get_debugger().set_trace(frame, **named)
    elif name == "IPython":
        eval("_embed()", frame.f_globals, {**frame.f_locals, "_embed": partial(function, *args, **named)})
    else:
        function(frame, *args, **named)


def _flush_streams() -> bool:
    done = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # it is closed, or its terminal has gone
            done = False
    return done
