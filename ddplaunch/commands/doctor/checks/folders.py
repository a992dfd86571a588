"""The folders that a job writes to: whether that works there, and how much room is left; /dev/shm is one of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ddplaunch import TYPE_CHECKING
from ddplaunch.agent.check import MIN_DISK_BYTES, MIN_SHM_BYTES
from ddplaunch.commands.doctor.checks import (
    CheckContext,
    FactReader,
    Finding,
    Findings,
    HealthCheck,
    KernelNumber,
    Severity,
)
from ddplaunch.commands.doctor.probe import REPLY_TIMEOUT_S, HelperProbe
from ddplaunch.dataclass import dataclass
from ddplaunch.wire.bounds import TextLine
from ddplaunch.words import format_size

if TYPE_CHECKING:
    from ddplaunch.commands.doctor.facts import NodeFacts

GIB = 1 << 30
DATALOADER_SHM_BYTES = GIB  # bytes of /dev/shm that the loaders of a few ranks fill at once
LOW_DISK_BYTES = GIB

_CACHE_DIR_TEXT = "the cache folder"


@dataclass(frozen=True)
class JobFolder:
    """A folder that a job writes to."""

    what: TextLine  # "the current folder": its path may tell more than a bug report should
    total: KernelNumber | None = None
    free: KernelNumber | None = None
    error: TextLine | None = None  # why nothing can be written there
    silent: bool = False  # its file system did not answer


def _read(where: CheckContext) -> FactReader:
    places = {
        "the current folder": where.cwd,
        "TMPDIR": where.environ.get("TMPDIR") or "/tmp",
        _CACHE_DIR_TEXT: where.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
        "/dev/shm": "/dev/shm",
    }
    probe = HelperProbe.of(check_folders, *(word for place in places.items() for word in place))
    return lambda: {"folders": probe.read_result(tuple[JobFolder, ...], 2 * REPLY_TIMEOUT_S) or ()}


def check_folders(*words: str) -> tuple[JobFolder, ...]:
    """The folders of these names and paths in turn, each in a thread of its own: a file server may be dead."""
    pool = ThreadPoolExecutor()
    looks = {what: pool.submit(_check_folder, what, path) for what, path in zip(words[::2], words[1::2], strict=True)}
    wait(looks.values(), REPLY_TIMEOUT_S)
    return tuple(_seen(what, look) for what, look in looks.items())


def _seen(what: str, look: Future[JobFolder]) -> JobFolder:
    if not look.done():
        return JobFolder(what, silent=True)
    return JobFolder(what, error="unknown") if look.exception() else look.result()


def _check_folder(what: str, path: str) -> JobFolder:
    """Whether a folder can be written to, and how much."""
    place = path
    while what == _CACHE_DIR_TEXT and not os.path.exists(place) and place != os.path.dirname(place):  # it will be made
        place = os.path.dirname(place)
    try:
        room = os.statvfs(place)
        total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    except OSError as error:
        return JobFolder(what, error=error.strerror)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return JobFolder(what, total, free, error=error.strerror)
    return JobFolder(what, total, free)


def _shared_memory(name: str, facts: NodeFacts) -> Findings:
    shm = next((folder for folder in facts.folders if folder.what == "/dev/shm"), None)
    if shm is None or shm.free is None or shm.error or shm.silent:
        return
    if shm.free < DATALOADER_SHM_BYTES:
        severity = Severity.ERROR if shm.free <= MIN_SHM_BYTES else Severity.WARNING
        text = (
            f"/dev/shm has {format_size(shm.free)} free of {format_size(shm.total or 0)}; DataLoader workers and NCCL "
            "need more, often over 1 GiB"
        )
        yield Finding(
            severity, name, text, "docker run --shm-size 16g (or --ipc host); else mount -o remount,size=16g /dev/shm"
        )


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    yield from _shared_memory(name, facts)
    for folder in facts.folders:
        yield from _folder(name, folder)


def _folder(name: str, folder: JobFolder) -> Findings:
    vital = folder.what in ("TMPDIR", "/dev/shm")
    if folder.silent:
        text = f"the file system of {folder.what} did not answer in {REPLY_TIMEOUT_S:g} s"
        yield Finding(Severity.ERROR, name, text, "look at the file server and the mount (`mount`, dmesg)")
    elif folder.error:
        severity = Severity.ERROR if vital else Severity.WARNING
        yield Finding(severity, name, f"nothing can be written to {folder.what}: {folder.error}", _how_to_move(folder))
    elif folder.what != "/dev/shm" and folder.free is not None and folder.free < LOW_DISK_BYTES:
        severity = Severity.ERROR if folder.free < MIN_DISK_BYTES else Severity.WARNING
        text = f"{folder.what} has {format_size(folder.free)} free of {format_size(folder.total or 0)}"
        yield Finding(severity, name, text, f"free some space, or {_how_to_move(folder)}")


def _how_to_move(folder: JobFolder) -> str:
    return "choose another: export TMPDIR=FOLDER" if folder.what == "TMPDIR" else "choose another folder"


def _free(what: str) -> Callable[[NodeFacts], int | None]:
    return lambda facts: next((folder.free for folder in facts.folders if folder.what == what), None)


CHECK = HealthCheck(
    _read,
    _find_problems,
    size_rows={
        "free: /dev/shm": _free("/dev/shm"),
        "  this folder": _free("the current folder"),
        "  TMPDIR": _free("TMPDIR"),
        "  cache": _free(_CACHE_DIR_TEXT),
    },
)
