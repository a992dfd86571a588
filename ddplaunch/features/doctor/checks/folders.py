"""Check of the folders that a job writes to, /dev/shm included: whether they are writable, and their free space."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from ddplaunch.base.text import format_size
from ddplaunch.features.check.machine_check import MIN_DISK_BYTES, MIN_SHM_BYTES
from ddplaunch.features.doctor.checks import CheckContext, FactReader, Finding, Findings, HealthCheck, Severity
from ddplaunch.features.doctor.node_facts import JobFolder, NodeFacts
from ddplaunch.features.doctor.probe import REPLY_TIMEOUT_S, HelperProbe

GIB = 1 << 30
DATALOADER_SHM_BYTES = GIB  # bytes of /dev/shm that DataLoaders of a few ranks use at once
LOW_DISK_BYTES = GIB

_CACHE_DIR_TEXT = "the cache folder"


def _read(context: CheckContext) -> FactReader:
    places = {
        "the current folder": context.cwd,
        "TMPDIR": os.environ.get("TMPDIR") or "/tmp",
        _CACHE_DIR_TEXT: os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
        "/dev/shm": "/dev/shm",
    }
    probe = HelperProbe.for_function(check_folders, *(word for place in places.items() for word in place))
    return lambda: {"folders": probe.read_result(tuple[JobFolder, ...], 2 * REPLY_TIMEOUT_S) or ()}


def check_folders(*words: str) -> tuple[JobFolder, ...]:
    """Check the folders given as name, path, name, path …, each in its own thread: a file server may hang."""
    pool = ThreadPoolExecutor()
    checks = {what: pool.submit(_check_folder, what, path) for what, path in zip(words[::2], words[1::2], strict=True)}
    wait(checks.values(), REPLY_TIMEOUT_S)
    return tuple(_get_result(what, check) for what, check in checks.items())


def _get_result(what: str, check: Future[JobFolder]) -> JobFolder:
    if not check.done():
        return JobFolder(what, silent=True)
    return JobFolder(what, error="unknown") if check.exception() else check.result()


def _check_folder(what: str, path: str) -> JobFolder:
    """Check whether a folder is writable, and its free space."""
    existing = path  # the cache folder is created later, below this one
    while what == _CACHE_DIR_TEXT and not os.path.exists(existing) and existing != os.path.dirname(existing):
        existing = os.path.dirname(existing)
    try:
        stat = os.statvfs(existing)
        total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    except OSError as error:
        return JobFolder(what, error=error.strerror)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return JobFolder(what, total, free, error=error.strerror)
    return JobFolder(what, total, free)


def _check_shared_memory(name: str, facts: NodeFacts) -> Findings:
    shm = next((folder for folder in facts.folders if folder.what == "/dev/shm"), None)
    if shm is None or shm.free is None or shm.error or shm.silent:
        return
    if shm.free < DATALOADER_SHM_BYTES:
        severity = Severity.ERROR if shm.free <= MIN_SHM_BYTES else Severity.WARNING
        free = f"/dev/shm has {format_size(shm.free)} free of {format_size(shm.total or 0)}"
        hint = "docker run --shm-size 16g (or --ipc host); else mount -o remount,size=16g /dev/shm"
        yield Finding(severity, name, f"{free}; DataLoader workers and NCCL need more, often over 1 GiB", hint)


def _find_problems(name: str, facts: NodeFacts) -> Findings:
    yield from _check_shared_memory(name, facts)
    for folder in facts.folders:
        yield from _check_job_folder(name, folder)


def _check_job_folder(name: str, folder: JobFolder) -> Findings:
    vital = folder.what in ("TMPDIR", "/dev/shm")
    if folder.silent:
        text = f"the file system of {folder.what} did not answer within {REPLY_TIMEOUT_S:g} s"
        yield Finding(Severity.ERROR, name, text, "check the file server and the mount (`mount`, dmesg)")
    elif folder.error:
        severity = Severity.ERROR if vital else Severity.WARNING
        yield Finding(severity, name, f"cannot write to {folder.what}: {folder.error}", _move_hint(folder))
    elif folder.what != "/dev/shm" and folder.free is not None and folder.free < LOW_DISK_BYTES:
        severity = Severity.ERROR if folder.free < MIN_DISK_BYTES else Severity.WARNING
        text = f"{folder.what} has {format_size(folder.free)} free of {format_size(folder.total or 0)}"
        yield Finding(severity, name, text, f"free some space, or {_move_hint(folder)}")


def _move_hint(folder: JobFolder) -> str:
    return "choose another: export TMPDIR=FOLDER" if folder.what == "TMPDIR" else "choose another folder"


def _free_bytes_reader(what: str) -> Callable[[NodeFacts], int | None]:
    return lambda facts: next((folder.free for folder in facts.folders if folder.what == what), None)


CHECK = HealthCheck(
    _read,
    _find_problems,
    size_rows={
        "free: /dev/shm": _free_bytes_reader("/dev/shm"),
        "  this folder": _free_bytes_reader("the current folder"),
        "  TMPDIR": _free_bytes_reader("TMPDIR"),
        "  cache": _free_bytes_reader(_CACHE_DIR_TEXT),
    },
)
