"""The option ``--metrics``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

import os
from typing import Annotated

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.options import Option, OptionGroup


def _check_prom_path(option: Option, text: str | None) -> str | None:
    """Check that the name of the metrics file ends in .prom: Prometheus' textfile collector ignores other files."""
    if text is not None and not text.endswith(".prom"):
        raise UsageError(
            f"--metrics {sanitize_line(text, 60)}: expected a file that ends in .prom", "--metrics job.prom"
        )
    return text


def check_folder(path: str) -> None:
    """Raise UsageError if the metrics file, which need not exist yet, cannot be written to its folder."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(
            f"--metrics {sanitize_line(path, 60)}: there is no folder {sanitize_line(folder, 60)}", f"mkdir -p {folder}"
        )
    if os.path.isdir(path):
        raise UsageError(f"--metrics {sanitize_line(path, 60)} is a folder, not a file", f"--metrics {path}/job.prom")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"--metrics {sanitize_line(path, 60)}: no permission to write to {sanitize_line(folder, 60)}",
            "name another folder",
        )


# With two or three lines for an option, a group can be seen at once.
# fmt: off


class MetricsFile(OptionGroup, frozen=True):
    """Metrics for monitoring."""

    heading = "Sidecars, notifications and metrics"
    after = "notify"

    metrics: Annotated[str | None, Option("--metrics FILE.prom",
        "Write metrics to this file on each node every 15 s, for Prometheus' textfile collector.",
        _check_prom_path, completion="file")] = None
