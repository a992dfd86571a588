"""Runs a container of a pod as a process of this machine, and keeps what it prints as the kubelet does."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.kubernetes.objects import now


class Log:
    """The log of a container: lines with their moments."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, bytes]] = []
        self._changed = threading.Condition()
        self._is_complete = False

    def append(self, line: bytes) -> None:
        with self._changed:
            self._lines.append((time.time_ns(), line))
            self._changed.notify_all()

    def complete(self) -> None:
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    @property
    def tail(self) -> str:
        """Its last 2 KiB: the termination message of a container that failed."""
        return b"".join(line for _, line in self._lines)[-2048:].decode()

    def read(self, since_ns: int, tail: int | None, *, follow: bool) -> Iterator[bytes]:
        """Yield the lines from a moment on, each with its timestamp."""
        at = 0 if tail is None else max(0, len(self._lines) - tail)
        while True:
            with self._changed:
                while follow and at == len(self._lines) and not self._is_complete:
                    if not self._changed.wait(0.2):
                        break
                new, at = self._lines[at:], len(self._lines)
                is_over = not follow or (self._is_complete and not new)
            yield b"".join(b"%s %s" % (now(ns).encode(), line) for ns, line in new if ns >= since_ns)
            if is_over:
                return


_LIBC, _CLONE_NEWUTS = ctypes.CDLL(None), 0x04000000


class ContainerProcess:
    """The process of a container, and of its image and machine what a launcher needs."""

    def __init__(self, hostname: str, words: list[str], environ: dict[str, str], folder: Path, own: Path) -> None:
        """``folder``: the image's working directory; ``own``: a folder of the pod."""
        self._hostname = hostname
        self.log = Log()
        self.code: int | None = None
        for name in ("state", "tmp"):
            (own / name).mkdir(parents=True)
        self._sockets = tempfile.TemporaryDirectory(prefix="pod-")  # the path of a socket is short
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        image = {"PATH": path, "HOME": str(own), "LANG": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        image |= {"XDG_STATE_HOME": f"{own}/state", "XDG_RUNTIME_DIR": self._sockets.name, "TMPDIR": f"{own}/tmp"}
        passed = {name: value for name, value in os.environ.items() if name.startswith("DDPLAUNCH_TEST")}
        self.environ, self.folder = {**image, **passed, **environ}, folder
        self._process = self.start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def start(self, words: list[str], **options: object) -> "subprocess.Popen[bytes]":
        """Start a command in the container."""
        own = {"cwd": self.folder, "env": self.environ, "start_new_session": True, "preexec_fn": self._set_hostname}
        return subprocess.Popen(words, **own, **options)  # type: ignore[call-overload, no-any-return]

    def _set_hostname(self) -> None:
        """Give the process the host name of its pod, which root may."""
        if _LIBC.unshare(_CLONE_NEWUTS) == 0:
            socket.sethostname(self._hostname)

    def wait(self) -> int:
        """Keep its output until its end; return its exit code."""
        assert self._process.stdout
        for line in self._process.stdout:
            self.log.append(line if line.endswith(b"\n") else line + b"\n")
        code = self._process.wait()
        self.code = code = 128 - code if code < 0 else code
        self.log.complete()
        self._sockets.cleanup()
        return code

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after the grace."""
        self._signal(signal.SIGTERM)
        threading.Timer(grace_s, self._signal, [signal.SIGKILL]).start() if grace_s else self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number) if number == signal.SIGTERM else os.killpg(self._process.pid, number)
