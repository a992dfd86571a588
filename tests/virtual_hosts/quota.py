"""Limits the CPU time of a host by a control group, as a container's is limited."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

_PERIOD = 100_000  # microseconds, as docker has it


def _parents() -> Iterator[Path]:
    """Return the roots of control groups with a CPU controller, of version 2 or 1."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        folder = Path(mount)
        if kind == "cgroup2":
            with suppress(OSError):
                if "cpu" in (folder / "cgroup.subtree_control").read_text().split():
                    yield folder
        elif kind == "cgroup" and "cpu" in options.split(",") and (folder / "cpu.cfs_quota_us").exists():
            yield folder


class Quota:
    """One control group, there from ``set`` to ``lift``."""

    def __init__(self, name: str) -> None:
        self.group = next((parent / name for parent in _parents()), None)

    def set(self, cpus: float, processes: Iterable[int]) -> None:
        """Limit these processes together to the time of ``cpus`` CPUs."""
        if self.group is None:
            pytest.skip("NO CPU QUOTA HERE: no control group with a cpu controller")
        quota = round(cpus * _PERIOD)
        try:
            self.group.mkdir()
            if (self.group / "cpu.max").exists():
                (self.group / "cpu.max").write_text(f"{quota} {_PERIOD}")
            else:
                (self.group / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (self.group / "cpu.cfs_quota_us").write_text(str(quota))
            for pid in processes:
                with suppress(ProcessLookupError):
                    (self.group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            pytest.skip(f"NO CPU QUOTA HERE: {error}")

    def lift(self) -> None:
        """Remove it; its processes have ended."""
        if self.group is not None and self.group.exists():
            self.group.rmdir()
