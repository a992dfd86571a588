"""PID 1 of a virtual host: sets the host up, reaps its orphans, and ends it with the test process.

Its argument is its settings (JSON). It is started in the host's namespaces, and prints "ready" when the host is. As it
is PID 1, the kernel kills all processes of the host with it.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys

BIND, MOVE, RECURSIVE, PRIVATE = 4096, 8192, 16384, 1 << 18
DETACH = 2
SHM = "/dev/shm"

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """mount(2)."""
    if _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"mount {source} on {target}")


def set_up(hostname: str, files: "dict[str, str]") -> None:
    """Give the host its name, its files in /etc, and its own /proc, /sys and /dev/shm."""
    socket.sethostname(hostname)
    mount("none", "/", flags=RECURSIVE | PRIVATE)
    mount("proc", "/proc", "proc")
    # A bind mount from this file system stays when the file system is detached, so no file is visible elsewhere.
    mount("tmpfs", SHM, "tmpfs")
    for number, (path, text) in enumerate(files.items()):
        source = f"{SHM}/{number}"
        with open(source, "w") as file:
            file.write(text)
        mount(source, path, flags=BIND)
    show_network_in_sys(f"{SHM}/sys")
    _libc.umount2(SHM.encode(), DETACH)
    mount("tmpfs", SHM, "tmpfs")


def show_network_in_sys(stage: str) -> None:
    """Mount a /sys with the host's interfaces, and with the control groups of the former one."""
    os.mkdir(stage)
    try:
        mount("sysfs", stage, "sysfs")
        mount("/sys/fs/cgroup", f"{stage}/fs/cgroup", flags=BIND | RECURSIVE)
        mount(stage, "/sys", flags=MOVE)
    except OSError:
        pass  # a container may not allow it; the host then sees the interfaces of the machine there


def wait_for_end(fd: int) -> None:
    """Wait until the process of a pidfd ends."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll()


def main() -> None:
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # PID 1 ignores signals from its namespace that it does not handle
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps for a parent that ignores this
    os.chdir("/")
    set_up(settings["hostname"], settings["files"])
    os.write(1, b"ready\n")
    for fd in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    wait_for_end(settings["test_process"])
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass  # there is no other process


if __name__ == "__main__":
    main()
