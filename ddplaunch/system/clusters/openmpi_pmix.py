"""Queries PMIx for the host of each rank, which Open MPI 5 sets in no variable.

A child process queries it, because the library starts threads, which a launcher must not have. The library is that of
mpirun's daemon. Names and types are those of the PMIx standard, version 4: PMIx_Init, PMIx_Get, PMIX_HOSTNAME.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from ddplaunch.system.processes.proc_utils import read_state

NAMESPACE_VARIABLE = "PMIX_NAMESPACE"  # prterun-n1-4711@1

QUERY_TIMEOUT_S = 60.0  # a query takes 0.1 s
MAX_ANCESTORS = 8  # between this process and the daemon; mostly shells

_QUERY_SCRIPT = """
import ctypes, sys

class Process(ctypes.Structure):
    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]

class Data(ctypes.Union):
    _fields_ = [("string", ctypes.c_char_p), ("whole", ctypes.c_char * 64)]

class Value(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("data", Data)]

pmix, none = ctypes.CDLL(sys.argv[1]), ctypes.c_size_t(0)
own = Process()
if pmix.PMIx_Init(ctypes.byref(own), None, none) == 0:
    for rank in range(int(sys.argv[2])):
        asked, value = Process(own.namespace, rank), ctypes.POINTER(Value)()
        if pmix.PMIx_Get(ctypes.byref(asked), b"pmix.hname", None, none, ctypes.byref(value)) == 0:
            print(value.contents.data.string.decode() if value.contents.type == 3 else "")
    pmix.PMIx_Finalize(None, none)
"""


def query_hosts(environ: Mapping[str, str], size: int) -> tuple[str, ...] | None:
    """Return the host of each rank; None without PMIx."""
    namespace = environ.get(NAMESPACE_VARIABLE)
    if not namespace or namespace != os.environ.get(NAMESPACE_VARIABLE):  # of another process
        return None
    if (library := _find_library()) is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        command = [sys.executable, "-I", "-S", "-c", _QUERY_SCRIPT, library, str(size)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
        hosts = tuple(done.stdout.split())
        return hosts if len(hosts) == size else None
    return None


def _find_library() -> str | None:
    """Return the PMIx library that the nearest ancestor process has loaded, None if there is none."""
    pid = os.getppid()
    for _ in range(MAX_ANCESTORS):
        try:
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as maps:
                path = next((line.split(maxsplit=5)[5].strip() for line in maps if "/libpmix.so" in line), None)
        except OSError:
            return None
        if path or pid == 1:
            return path
        pid = read_state(pid)[1]
    return None
