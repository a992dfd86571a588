"""Enters Linux namespaces in a thread that ends afterwards.

Namespaces belong to threads, so a thread may enter a host, start a process there and end: the process is a direct
child, with its own exit status and pid, and no other process is in between that would have to forward signals.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

FS, MOUNT, UTS, IPC, PID, NET = 0x200, 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
"""The CLONE_* flags. FS is not a namespace: only a thread with a cwd of its own may enter a MOUNT namespace."""

HOST = MOUNT | UTS | IPC | PID | NET
"""The namespaces of a host."""

_libc = ctypes.CDLL(None, use_errno=True)

Result = TypeVar("Result")


class HostError(Exception):
    """A virtual host or its network could not do what was requested."""


def unshare(flags: int) -> None:
    """Move the calling thread into new namespaces (PID: its next child)."""
    if _libc.unshare(flags):
        raise OSError(ctypes.get_errno(), f"unshare({flags:#x}): {os.strerror(ctypes.get_errno())}")


def setns(fd: int, flags: int) -> None:
    """Move the calling thread into a namespace, or with a pidfd into several of a process."""
    if _libc.setns(fd, flags):
        raise OSError(ctypes.get_errno(), f"setns({flags:#x}): {os.strerror(ctypes.get_errno())}")


def in_thread(action: Callable[[], Result]) -> Result:
    """Call a function in a new thread, whose namespaces it may change; return or raise its result."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(action).result()


class NetworkNamespace:
    """A network namespace, kept by an open file."""

    def __init__(self, fd: int | None = None) -> None:
        """Make a new one, or take that of ``fd``."""
        self.fd = in_thread(_new_network) if fd is None else fd

    def call(self, *words: str, stdin: str = "") -> None:
        """Run a command in it; HostError if it fails."""

        def run() -> subprocess.CompletedProcess[str]:
            setns(self.fd, NET)
            return subprocess.run(words, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        done = in_thread(run)
        if done.returncode:
            raise HostError(f"{' '.join(words)}: exit status {done.returncode}: {done.stdout.strip()}\n{stdin}")

    def ip(self, *lines: str) -> None:
        """Run ``ip LINE`` for each line."""
        self.call("ip", "-batch", "-", stdin="\n".join(lines) + "\n")

    def nft(self, text: str) -> None:
        """Change the firewall."""
        self.call("nft", "-f", "-", stdin=text)

    def sysctl(self, name: str, value: str) -> None:
        """Change a kernel setting below ``net``."""
        self.call("tee", f"/proc/sys/net/{name}", stdin=value)

    def close(self) -> None:
        """Close the file; the kernel removes the namespace when it has no process."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def current_network() -> int:
    """Open a file of the calling thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _new_network() -> int:
    unshare(NET)
    return current_network()
