"""Hydra, asked over the socket that it gives each process (PMI_FD): which ranks share a host, and where rank 0 is.

The words are those of PMI 1 on the wire, which RFC 13 of flux-framework writes down. A program that uses MPI begins
with "init" on the same socket later, and must find it as if it had not been asked: so we begin without, and say
"finalize" only when we end: Hydra takes a process that has asked and ends without it for one that has crashed, and
kills all.
"""

from __future__ import annotations

import os
import re
import select
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ddplaunch.dataclass import dataclass
from ddplaunch.errors import host_name

FD_VARIABLE = "PMI_FD"  # 5
HOST_VARIABLES = ("PMI_HOSTNAME", "HYDRA_BSTRAP_LOCALHOST")  # n1, as it was typed: MPICH's name and Intel's

LOCALHOST = "localhost"
HOST_KEY = "ddplaunch-host"
EXCHANGE_TIMEOUT_S = 300.0  # seconds for the slowest host to come as far as this
FINALIZE_TIMEOUT_S = 5.0  # likewise for the answer to our end, which Hydra must have sent
MAX_REPLY_BYTES = 1 << 16

_ITEM = r"\((\d+),(\d+),(\d+)\)|\[([^]]*)\]x(\d+)|(\d+)"


@dataclass(frozen=True)
class HydraJob:
    """What Hydra says of a job: its name, the host of each rank by number (empty if unknown), and rank 0's by name."""

    name: str
    hosts: tuple[int, ...]
    first: str | None


_fd: int | None = None  # once it was asked; it stays as blocking as it is, for the program has it too
_cached_job: HydraJob | None = None


def query_hydra(environ: Mapping[str, str], rank: int, size: int) -> HydraJob | None:
    """Return what Hydra says, once all processes of the job have asked; None where it cannot be asked."""
    global _fd, _cached_job
    if (
        _fd is not None or not environ.get(FD_VARIABLE) or environ[FD_VARIABLE] != os.environ.get(FD_VARIABLE)
    ):  # asked, or another process's
        return _cached_job
    with suppress(OSError, ValueError):
        fd = int(environ[FD_VARIABLE])
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        _fd = fd
        name = _send_command("get_my_kvsname", "kvsname")
        mapping = _send_command(
            f"get kvsname={name} key=PMI_process_mapping"
        )  # none where it is longer than a value may be
        if rank == 0:
            typed = next((environ[each] for each in HOST_VARIABLES if environ.get(each)), LOCALHOST)
            own = host_name() if typed.startswith((LOCALHOST, "127.")) else typed
            _send_command(f"put kvsname={name} key={HOST_KEY} value={own}", "rc")
        _send_command("barrier_in", "cmd")
        first = _send_command(f"get kvsname={name} key={HOST_KEY}") or None
        _cached_job = HydraJob(name, parse_mapping(mapping, size), first)
    return _cached_job


def finalize() -> None:
    """Let Hydra know that this process ends as it should; it has hung up where the program has said so before."""
    if _fd is not None:
        with suppress(OSError, ValueError):
            _send_command("finalize", patience=FINALIZE_TIMEOUT_S)


def _send_command(words: str, wanted: str = "value", patience: float = EXCHANGE_TIMEOUT_S) -> str:
    """Send a command and return a field of the answer, "" if it has none."""
    assert _fd is not None
    os.write(_fd, f"cmd={words}\n".encode())
    answer = b""
    while not answer.endswith(b"\n"):
        ready, _, _ = select.select([_fd], [], [], patience)
        part = os.read(_fd, 4096) if ready else b""
        if not part or len(answer) > MAX_REPLY_BYTES:
            raise OSError("Hydra does not answer")
        answer += part
    fields = dict(field.partition("=")[::2] for field in answer.decode().split())
    return fields.get(wanted, "")


def parse_mapping(mapping: str, size: int) -> tuple[int, ...]:
    """Read the host of each rank from "(vector,(0,2,8),(2,1,4))": first host, hosts, ranks on each; then the next.

    MPICH 5 writes "3" for (3,1,1), and "[…]x2" for what comes twice. Nothing is read of something else.
    """
    inside = re.fullmatch(r"\(vector,(.*)\)", mapping)
    numbers = list(_blocks(inside[1])) if inside else []
    return tuple(numbers[rank % len(numbers)] for rank in range(size)) if numbers else ()


def _blocks(items: str) -> Iterator[int]:
    for first, count, each, repeated, times, single in re.findall(_ITEM, items):
        if single:
            yield int(single)
        elif repeated:
            yield from list(_blocks(repeated)) * int(times)
        else:
            yield from (int(first) + host for host in range(int(count)) for _ in range(int(each)))
