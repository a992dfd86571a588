"""One machine looked at: what the kernel says at once is read here, what may hang is asked of children."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec

from ddplaunch import __version__
from ddplaunch.agent.limits import groups, memory, number
from ddplaunch.commands.doctor.facts import CACHE, Facts, Folder, Limits, Link
from ddplaunch.commands.doctor.inquiry import DEADLINE, TORCH_DEADLINE, Inquiry
from ddplaunch.commands.doctor.subjects import GpusFound, TorchFound
from ddplaunch.control.route import Lookup, interface_of
from ddplaunch.devices.cpu import read_cpu

T = TypeVar("T")
LOOPBACK_DEADLINE = 2.0  # seconds for a connection that leaves no machine
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)


def look(cwd: str, toward: str, environ: Mapping[str, str]) -> Facts:
    """Look at this machine; ``toward`` is node 0's address, "" where there is one node."""
    gpus = Inquiry("gpus")
    torch = Inquiry("torch", deadline=TORCH_DEADLINE)
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = {
        "the current folder": cwd,
        "TMPDIR": environ.get("TMPDIR") or "/tmp",
        CACHE: cache,
        "/dev/shm": "/dev/shm",
    }
    folders = {what: Inquiry("folder", what, path) for what, path in places.items()}
    link, link_error = route(toward) if toward else (None, None)
    own_name = Lookup(socket.gethostname())
    cpu = read_cpu("/sys")
    total, available = memory(cpu.memory_total, cpu.memory_available)
    found_gpus = _read(gpus.answer(), GpusFound)
    asked = torch.answer()
    found_torch = _read(asked, TorchFound)
    why_no_torch = (
        f"torch could not be imported in {TORCH_DEADLINE:g} s" if asked is None else "import torch ended Python"
    )
    own_name.wait(DEADLINE)
    addresses = [str(where[0]) for _, where in own_name.addresses]
    return Facts(
        host=socket.gethostname(),
        ddplaunch=__version__,
        python="{}.{}.{}".format(*sys.version_info[:3]),
        kernel=os.uname().release,
        torch=found_torch.torch if found_torch else None,
        torch_error=found_torch.error if found_torch else why_no_torch,
        gpus=found_gpus.gpus if found_gpus else (),
        gpus_error=found_gpus.error if found_gpus else f"the GPU driver did not answer in {DEADLINE:g} s",
        lost_gpus=found_gpus.lost if found_gpus else (),
        folders=tuple(_folder(what, inquiry.answer()) for what, inquiry in folders.items()),
        limits=_limits(),
        memory_total=total,
        memory_available=available,
        cpus=len(cpu.allowed),
        quota=cpu.quota,
        load=os.getloadavg()[0],
        infiniband=tuple(_listed("/sys/class/infiniband")),
        link=link,
        link_error=link_error,
        loopback=_loopback(),
        clock_synchronised=_clock_synchronised(),
        named_loopback=next((each for each in addresses if each.startswith("127.") or each == "::1"), None),
    )


def _read(answer: bytes | None, kind: type[T]) -> T | None:
    if not answer:
        return None
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(answer, type=kind)
    return None


def _folder(what: str, answer: bytes | None) -> Folder:
    return _read(answer, Folder) or Folder(what, silent=answer is None, error="unknown" if answer is not None else None)


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _limits() -> Limits:
    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    left: list[int] = []
    for folder in groups("pids"):
        limit, used = number(f"{folder}/pids.max"), number(f"{folder}/pids.current")
        if limit is not None and used is not None:
            left.append(limit - used)
    return Limits(
        memlock=soft(resource.RLIMIT_MEMLOCK),
        open_files=soft(resource.RLIMIT_NOFILE),
        processes=soft(resource.RLIMIT_NPROC) if os.geteuid() else None,
        processes_left=min(left, default=None),
    )


def route(toward: str) -> tuple[Link | None, str | None]:
    """The interface that leads to an address, or why none does."""
    lookup = Lookup(toward)
    if not lookup.wait(DEADLINE):
        return None, f"no name server has said in {DEADLINE:g} s what address {toward} has"
    if lookup.error or not lookup.addresses:
        return None, f"the name {toward} does not resolve"
    error: OSError | None = None
    for family, where in lookup.addresses:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((where[0], 9, *where[2:]))  # sends nothing
                address, there = str(probe.getsockname()[0]), str(probe.getpeername()[0])
        except OSError as refused:
            error = refused
            continue
        name = interface_of(address)
        folder = f"/sys/class/net/{name}"
        speed = number(f"{folder}/speed") if name else None
        mtu = number(f"{folder}/mtu") if name else None
        return Link(address, name, mtu, speed if speed and speed > 0 else None, there), None
    return None, f"{toward}: {error.strerror if error else 'no address'}"


def _loopback() -> str | None:
    """Why this machine cannot connect to itself, as ranks on it do; None where it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), LOOPBACK_DEADLINE).close()
    except TimeoutError:
        return "gets no answer"
    except ConnectionRefusedError:
        return "is refused"
    except OSError as error:
        return f"fails: {error.strerror}"
    return None


def _clock_synchronised() -> bool | None:
    """Whether the kernel knows of a time server that keeps the clock (adjtimex(2))."""
    try:
        timex = (ctypes.c_char * 512)()  # struct timex; its first field, what to change, is 0: nothing
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _UNSYNCHRONISED
