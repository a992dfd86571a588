"""Compares the provenance of an earlier run with the present state, before its command runs again."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress

from msgspec.structs import replace

from ddplaunch.features.runs.provenance import Provenance, read_diff_file, read_provenance_file
from ddplaunch.features.runs.provenance_process import probe_command
from ddplaunch.features.runs.run_comparison import compare_provenance
from ddplaunch.system.devices import read_hardware

MAX_DIFFERENCES = 12  # lines
TIMEOUT_S = 25.0  # longer than the timeout of git in the probe


def describe_differences(
    run: str, before: Provenance | None, diff: bytes, folder: str, *, with_code: bool
) -> list[str]:
    """Return a line for each thing that is not as in an earlier run; ``with_code``: also commit and changes."""
    if before is None:
        return [f"the commit and the versions of {run} are not recorded"]
    now, changes = read_current_provenance(folder)
    if now is None:
        return [f"what differs from {run} is unknown: it could not be found out in {TIMEOUT_S:g} s"]
    models = tuple(gpu.name for gpu in read_hardware().gpus)
    now = replace(now, gpus=before.gpus if {*before.gpus} <= {*models} else models)  # the run may have had only some
    rows = compare_provenance([before, now], [diff, changes])
    lines = [
        f"{row.name}: {row.values[0]} then, {row.values[1]} now" if row.differs else row.name  # "and 7 more packages"
        for row in rows
        if with_code or row.name not in ("commit", "changes")
    ]
    more = [f"and {len(lines) - MAX_DIFFERENCES} more differences"] if len(lines) > MAX_DIFFERENCES else []
    return [*lines[:MAX_DIFFERENCES], *more] or [f"commit, changes, versions and machine are as for {run}"]


def read_current_provenance(folder: str) -> tuple[Provenance | None, bytes]:
    """Return the provenance and the changes that a run in this folder would have now; None if that takes too long."""
    with tempfile.TemporaryDirectory() as draft:
        path = os.path.join(draft, "now")
        words = probe_command(path, [folder])
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=TIMEOUT_S)
        return read_provenance_file(f"{path}.json"), read_diff_file(f"{path}.diff")
