"""Client of Hydra's PMI socket (PMI_FD): which ranks share a host, and the host of rank 0.

The protocol is PMI 1 (RFC 13 of flux-framework). A program that uses MPI sends "init" on the same socket later and must
find it unused, so no "init" is sent here, and "finalize" only at the end of the launcher: Hydra treats a process that
has sent commands and ends without "finalize" as crashed, and kills all processes.
"""

from __future__ import annotations

import os
import re
import select
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress

from msgspec import Struct

from ddplaunch.base.errors import host_name

FD_VARIABLE = "PMI_FD"  # 5
HOST_VARIABLES = ("PMI_HOSTNAME", "HYDRA_BSTRAP_LOCALHOST")  # n1, as on the command line: MPICH's variable and Intel's

LOCALHOST = "localhost"
HOST_KEY = "ddplaunch-host"
EXCHANGE_TIMEOUT_S = 300.0  # for the slowest host to reach the barrier
FINALIZE_TIMEOUT_S = 5.0  # for the reply to "finalize", which must have arrived before this process ends
MAX_REPLY_BYTES = 1 << 16

_ITEM = r"\((\d+),(\d+),(\d+)\)|\[([^]]*)\]x(\d+)|(\d+)"


class HydraJob(Struct, frozen=True):
    """A job according to Hydra: its name, the host index of each rank (() if unknown), and rank 0's host name."""

    name: str
    hosts: tuple[int, ...]
    first: str | None


_fd: int | None = None  # once used; its blocking mode is not changed, since the program inherits it
_cached_job: HydraJob | None = None


def query_hydra(environ: Mapping[str, str], rank: int, size: int) -> HydraJob | None:
    """Query Hydra, with a barrier over all processes of the job; None if that is impossible."""
    global _fd, _cached_job
    number = environ.get(FD_VARIABLE)
    if _fd is not None or not number or number != os.environ.get(FD_VARIABLE):
        return _cached_job  # already queried, or the socket of another process
    with suppress(OSError, ValueError):
        fd = int(number)
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        _fd = fd
        name = _send_command("get_my_kvsname", "kvsname")
        mapping = _send_command(f"get kvsname={name} key=PMI_process_mapping")  # empty if longer than PMI's maximum
        if rank == 0:
            variable = next((environ[each] for each in HOST_VARIABLES if environ.get(each)), LOCALHOST)
            own = host_name() if variable.startswith((LOCALHOST, "127.")) else variable
            _send_command(f"put kvsname={name} key={HOST_KEY} value={own}", "rc")
        _send_command("barrier_in", "cmd")
        first = _send_command(f"get kvsname={name} key={HOST_KEY}") or None
        _cached_job = HydraJob(name, parse_mapping(mapping, size), first)
    return _cached_job


def finalize() -> None:
    """Send "finalize", so that Hydra does not treat the end as a crash; ignored if the program has done so before."""
    if _fd is not None:
        with suppress(OSError, ValueError):
            _send_command("finalize", timeout_s=FINALIZE_TIMEOUT_S)


def _send_command(words: str, field_name: str = "value", timeout_s: float = EXCHANGE_TIMEOUT_S) -> str:
    """Send a command to Hydra and return one field of its reply, "" if the reply does not have this field."""
    assert _fd is not None
    os.write(_fd, f"cmd={words}\n".encode())
    reply = b""
    while not reply.endswith(b"\n"):
        ready, _, _ = select.select([_fd], [], [], timeout_s)
        part = os.read(_fd, 4096) if ready else b""
        if not part or len(reply) > MAX_REPLY_BYTES:
            raise OSError("no reply from Hydra")
        reply += part
    fields = dict(field.partition("=")[::2] for field in reply.decode().split())
    return fields.get(field_name, "")


def parse_mapping(mapping: str, size: int) -> tuple[int, ...]:
    """Parse the host index of each rank from "(vector,(0,2,8),(2,1,4))": first host, host count, ranks on each.

    MPICH 5 writes "3" for (3,1,1), and "[…]x2" for two repetitions. Returns () for other text.
    """
    inside = re.fullmatch(r"\(vector,(.*)\)", mapping)
    numbers = list(_parse_blocks(inside[1])) if inside else []
    return tuple(numbers[rank % len(numbers)] for rank in range(size)) if numbers else ()


def _parse_blocks(items: str) -> Iterator[int]:
    for first, count, size, repeated, times, single in re.findall(_ITEM, items):
        if single:
            yield int(single)
        elif repeated:
            yield from list(_parse_blocks(repeated)) * int(times)
        else:
            yield from (int(first) + host for host in range(int(count)) for _ in range(int(size)))
