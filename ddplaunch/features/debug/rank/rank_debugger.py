"""The debugger of a rank: pdb, with input from the user at the launcher's terminal or in ``ddplaunch debug``.

Loaded at the first breakpoint. The socket to the launcher carries frames as between nodes (``base/frames.py``), with
the messages of ``features/debug/messages.py``. When the launcher or the user is gone, the rank continues.
"""

from __future__ import annotations

import _socket  # type: ignore[import-not-found, unused-ignore]  # socket without its enums
import _thread
import binascii
import json
import os
import pdb
import select
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType
    from typing import Any

    from ddplaunch.core.rank import rank_exit
    from ddplaunch.core.rank.rank_runner import load_private_module
else:
    rank_exit = load_private_module("core/rank/rank_exit")

_LENGTH = struct.Struct("!I")
_DELIMITERS = " \t\n`@#$%^&*()=+[{]}\\|;:'\",<>?"  # between words in completion, as in pdb
_MAX_WORDS = 200
_MAX_PROMPT_CHARS = 200  # longer text is output of the program, not a prompt
_CHUNK = 1 << 18  # characters per message
_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))) + os.sep


class Debugger:
    """The debugger of this process; one thread at a time can be stopped in it."""

    def __init__(self, path: str, rank: int) -> None:
        self.connection = DebugConnection(path, rank)
        self.rank, self.pid = rank, os.getpid()
        self.lock = _thread.allocate_lock()
        self.holder = 0  # id of the thread that holds the lock
        self._sessions: dict[int, RankPdb] = {}  # by thread id
        self.is_ours = _is_ddplaunch_frame

    def stop(self, frame: FrameType, *args: Any, header: str | None = None, **named: Any) -> None:
        """Stop the calling thread at the next line of ``frame``."""
        nested = self.holder == _thread.get_ident()
        if nested:
            can_stop = _is_traced()
        else:
            with self.lock:
                can_stop = self.connection.connect()
        if can_stop:
            session = RankPdb(self) if nested else self._get_session()
            if nested:
                session.prompt = f"({session.prompt.strip()}) "
            if header is not None:
                self.connection.write(f"{header}\n")
            session.set_trace(frame, *args, **named)

    def interrupt(self, frame: FrameType) -> None:
        """Called when the user pauses this rank: stop the main thread, unless a thread has stopped already."""
        if not self.lock.locked():
            self.connection.is_detached = False
            self.stop(frame)

    def post_mortem(self, error: BaseException, trace: TracebackType) -> None:
        if self.connection.connect(error):
            session = RankPdb(self)
            session.failed = error
            session.reset()
            session.interaction(None, trace)

    def stop_location(
        self, frame: FrameType | None, trace: TracebackType | None = None, failed: BaseException | None = None
    ) -> dict[str, object]:
        """Describe where the rank stops: at the innermost frame; after an exception, at that of the user's code."""
        line = frame.f_lineno if frame is not None else 0
        while trace is not None:
            path = trace.tb_frame.f_code.co_filename
            if frame is None or ("-packages" + os.sep not in path and not path.startswith(_LIBRARY_PREFIXES)):
                frame, line = trace.tb_frame, trace.tb_lineno
            trace = trace.tb_next
        code = frame.f_code  # type: ignore[union-attr]
        name = "" if code.co_name == "<module>" else code.co_name
        file = rank_exit.relative_path(code.co_filename)
        try:
            error = "" if failed is None else f"{type(failed).__name__}: {failed}"[:200]
        except BaseException:  # what the exception overrides
            error = "" if failed is None else rank_exit.type_name(failed)
        return {"file": file, "line": line, "function": name, "error": error}

    def _get_session(self) -> RankPdb:
        thread = _thread.get_ident()
        if thread not in self._sessions:
            self._sessions[thread] = RankPdb(self)
        return self._sessions[thread]


class DebugConnection:
    """The connection to the debug server; also the file object that pdb reads from and writes to."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, path: str, rank: int) -> None:
        self._path, self._rank = path, rank
        self._socket: Any = None
        self._text: list[str] = []
        self._size = 0
        self.is_detached = False  # the rank does not stop any more
        self.completer: RankPdb | None = None

    def connect(self, error: BaseException | None = None) -> bool:
        """Connect if not connected; return whether the rank may stop: a detached one may for errors only."""
        if self._socket is None and not self._connect():
            return False
        while self._has_pending_message():
            kind, _ = self._receive()
            self.is_detached = kind == "DetachUser" or (self.is_detached and kind != "AttachUser")
        return self._socket is not None and (error is not None or not self.is_detached)

    def _connect(self) -> bool:
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        connection.settimeout(None)
        folder = -1
        try:
            folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY)
            connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(self._path)}")  # the path may be too long
        except OSError as error:
            print(f"ddplaunch: rank {self._rank} does not stop: {self._path}: {error}", file=sys.stderr)
            connection.close()
            return False
        finally:
            if folder >= 0:
                os.close(folder)
        self._socket = connection
        return True

    def _has_pending_message(self) -> bool:
        """Whether a message of the launcher, or the end of the connection, can be read."""
        poll = select.poll()
        if self._socket is not None:
            poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _on_closed(self) -> None:
        """Called when the launcher has closed the connection."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self.is_detached = None, True

    def send(self, kind: str, **fields: object) -> None:
        message = {"op": kind, "rank": self._rank, **fields}
        body = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")  # file names may be any bytes
        try:
            if self._socket is not None:
                self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError:
            self._on_closed()

    def _receive(self) -> tuple[str, dict[str, Any]]:
        """Wait for the next message; ``DetachUser`` if the connection is closed."""
        try:
            message = json.loads(self._receive_exactly(_LENGTH.unpack(self._receive_exactly(_LENGTH.size))[0]))
        except (OSError, EOFError):
            self._on_closed()
            return "DetachUser", {}
        return message["op"], message

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(size - len(data)) if self._socket is not None else b""
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    # --------------------------------------------------------------------------------------------------- as a file

    def write(self, text: str) -> int:
        self._text.append(text)
        self._size += len(text)
        if self._size > _CHUNK:
            self._flush_output()
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def _flush_output(self, prompt: str = "") -> None:
        """Send the collected output to the launcher; with a ``prompt``, also ask for a line of input."""
        text, self._text, self._size = "".join(self._text).removesuffix(prompt), [], 0
        if not text and not prompt:
            return
        last = len(text) - 1 - (len(text) - 1) % _CHUNK if text else 0
        for begin in range(0, last + 1, _CHUNK):
            data = text[begin : begin + _CHUNK].encode("utf-8", "backslashreplace")
            encoded = binascii.b2a_base64(data, newline=False).decode()
            self.send("DebuggerOutput", data=encoded, prompt=prompt if begin == last else "")

    def readline(self, size: int = -1) -> str:
        """Show the output, its last line as the prompt, and wait for a line of input; "" if detached."""
        if self.is_detached:
            return ""
        last = "".join(self._text).rpartition("\n")[2]
        self._flush_output(last if last.strip() and last.isprintable() and len(last) <= _MAX_PROMPT_CHARS else " ")
        while True:
            kind, body = self._receive()
            if kind == "LineInput":
                return "" if body["line"] == "\x04" else f"{body['line']}\n"  # Ctrl-D
            if kind == "DetachUser":
                self.is_detached = True
                return ""
            if kind == "CompletionRequest" and self.completer is not None:
                begin, words = self.completer.complete_line(body["line"])
                self.send("Completions", begin=begin, words=words)

    def request_terminal(self) -> str:
        """Return the path of a pty that the launcher opens for this rank; "" if it cannot, or no user is attached."""
        self.send("TerminalRequest")
        while self._socket is not None:
            kind, body = self._receive()
            if kind == "TerminalRequest":
                return "" if self.is_detached else str(body.get("path", ""))
            self.is_detached = kind == "DetachUser"
        return ""

    def send_resumed(self, *, steps: bool) -> None:
        """Report that the thread continues; ``steps``: it will stop again soon."""
        self._flush_output()
        self.send("RankResumed", is_stepping=steps)

    def wait_for_release(self) -> None:
        """Wait until the launcher resumes this rank."""
        while self._receive()[0] != "DetachUser":
            pass


class RankPdb(pdb.Pdb):
    """pdb in one thread of a rank."""

    def __init__(self, debugger: Debugger) -> None:
        self._debugger = debugger
        connection: Any = debugger.connection
        self._connection = connection
        super().__init__(stdin=connection, stdout=connection, nosigint=True)
        self.prompt = f"(rank {debugger.rank}) "
        self.failed: BaseException | None = None  # the exception that has ended the program, in a post-mortem

    def interaction(self, frame: Any, trace: Any = None) -> None:
        """Stop at ``frame``, one thread of the rank at a time; a process that the rank has forked does not stop."""
        connection = self._debugger.connection
        if os.getpid() != self._debugger.pid:
            return self.set_continue()
        if self._debugger.holder == _thread.get_ident():
            return self._interact_nested(frame, trace)
        with self._debugger.lock:
            if not connection.connect(self.failed):
                return self.set_continue()
            connection.is_detached = False
            connection.completer = self
            self._debugger.holder = _thread.get_ident()
            connection.send("RankStopped", **self._debugger.stop_location(frame, trace, self.failed))
            try:
                super().interaction(frame, trace)
            finally:
                self._debugger.holder = 0
                connection.send_resumed(steps=self.stoplineno != -1 and self.failed is None)

    def _interact_nested(self, frame: Any, trace: Any) -> None:
        """Stop in code that the user runs from this thread's debugger, until that code continues."""
        connection = self._debugger.connection
        outer, connection.completer = connection.completer, self
        try:
            super().interaction(frame, trace)
        finally:
            connection.completer = outer

    def _cmdloop(self) -> None:
        """Read commands as pdb does, but without pdb's Ctrl-C handling: Ctrl-C is for the program."""
        self.cmdloop()

    def get_stack(self, f: Any, t: Any) -> Any:
        """Return the stack as pdb does, without ddplaunch's frames, which are the outermost."""
        stack, index = super().get_stack(f, t)
        skipped = next((n for n, (each, _) in enumerate(stack) if not _is_ddplaunch_frame(each)), 0)
        return stack[skipped:], max(0, index - skipped)

    def stop_here(self, frame: FrameType) -> bool:
        return not _is_ddplaunch_frame(frame) and super().stop_here(frame)

    def complete_line(self, line: str) -> tuple[int, list[str]]:
        """Complete the last word of a line: return where it begins, and the candidates."""
        begin = max(map(line.rfind, _DELIMITERS)) + 1
        before = line[:begin].strip()
        command = self.parseline(line)[0] if before else None
        find = self.completedefault if before else self.completenames
        try:
            if command:
                find = getattr(self, f"complete_{command}", self.completedefault)
            found = find(line[begin:], line, begin, len(line)) or []
            if not before:
                found = [*found, *self.completedefault(line[begin:], line, begin, len(line))]
            return begin, sorted({str(each) for each in found})[:_MAX_WORDS]
        except Exception:
            return begin, []

    def do_detach(self, arg: str) -> bool:
        """detach
        Continue this rank, without stops at breakpoints until the next `ddplaunch debug`.
        """
        self.clear_all_breaks()
        self._debugger.connection.is_detached = True
        self.set_continue()
        return True

    def do_EOF(self, arg: str) -> bool:
        """EOF
        End of input: the same as detach.
        """
        return self.do_detach(arg)

    def do_quit(self, arg: str) -> bool:
        """q(uit)
        End the job.
        """
        if self.failed is None:
            self._debugger.connection.send("QuitRequested")
            self._debugger.connection.wait_for_release()
        return self.do_detach(arg)

    do_q = do_exit = do_quit

    def do_run(self, arg: str) -> None:
        """run
        Not available: the ranks of a job start together.
        """
        self.error("a rank cannot be restarted alone")

    do_restart = do_run

    def do_interact(self, arg: str) -> Any:
        streams = sys.stdin, sys.stdout, sys.stderr
        sys.stdin = sys.stdout = sys.stderr = self._connection
        try:
            return super().do_interact(arg)
        except SystemExit:
            return None
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams

    do_interact.__doc__ = pdb.Pdb.do_interact.__doc__


def _is_traced() -> bool:
    """Whether this thread is traced: not while its debugger evaluates an expression, except in pdb's `debug`."""
    seen: list[str] = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, value: seen.append(event))
    try:
        (lambda: None)()
    finally:
        sys.settrace(before)
    return bool(seen)


_LIBRARY_PREFIXES = (os.path.dirname(os.__file__) + os.sep, "<frozen ")


def _is_ddplaunch_frame(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(_PACKAGE_DIR) and f"{os.sep}rank{os.sep}" in path[len(_PACKAGE_DIR) - 1 :]
