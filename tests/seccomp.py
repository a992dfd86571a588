"""Runs a command without some system calls, as on an older kernel or under a container's profile.

``python tests/seccomp.py ENOSYS pidfd_open,prctl COMMAND...``; each call then fails with this error.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

CALLS = {
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "socketpair": (53, 199),
    "sched_getaffinity": (204, 123),
    "prlimit64": (302, 261),
    "prctl": (157, 167),
}
"""Numbers of system calls, on x86_64 and on the machines with the generic table (asm-generic/unistd.h)."""

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000  # SECCOMP_RET_…
_SET_NO_NEW_PRIVS, _SET_SECCOMP = 38, 22  # PR_…


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def without(error: str, *calls: str) -> list[str]:
    """The words that, put before a command, have these calls fail in it with the error of that name."""
    return [sys.executable, str(Path(__file__)), error, ",".join(calls)]


def forbid_calls(number: int, calls: Sequence[str]) -> None:
    """Make these calls fail with errno ``number`` in this process and its children."""
    column = 0 if platform.machine() == "x86_64" else 1
    statements = [(_LOAD, 0, 0, 0)]
    for name in calls:
        statements += [(_EQUAL, 0, 1, CALLS[name][column]), (_RETURN, 0, 0, _FAIL | number)]
    statements.append((_RETURN, 0, 0, _ALLOW))
    program = _Program(len(statements), b"".join(struct.pack("HBBI", *each) for each in statements))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, 2, ctypes.byref(program), 0, 0)):
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    forbid_calls(getattr(errno, sys.argv[1]), sys.argv[2].split(","))
    os.execvp(sys.argv[3], sys.argv[3:])
