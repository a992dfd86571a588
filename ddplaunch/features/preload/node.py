"""Notes on why a program starts slowly; each is shown once for a program, until its file changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from zlib import crc32

from ddplaunch.base.safe_files import open_for_writing, read_regular_file
from ddplaunch.base.text import join_names
from ddplaunch.core.events import Event, ImportMismatch, ZygoteReady
from ddplaunch.core.feature import NodeSide
from ddplaunch.core.zygote_plan import ZygotePlan
from ddplaunch.features.preload.mismatches import (
    MAX_STATE_BYTES,
    PreloadMismatch,
    checksum,
    remember_mismatch,
    state_file,
)


def record_if_new(path: str | None, note: str) -> bool:
    """Whether a note on the program at ``path`` was not shown before; record it as shown.

    True also if the state file cannot be used.
    """
    try:
        file_name = state_file("noted")
        path = os.path.abspath(path or "")
        text = f"{path}\0{note}\0".encode(errors="replace")
        line = b"%08x %08x\n" % (crc32(text), checksum(path))
        os.makedirs(os.path.dirname(file_name), 0o700, exist_ok=True)
        with open(open_for_writing(file_name, os.O_APPEND, 0o600), "ab") as file:
            if line in read_regular_file(file_name, MAX_STATE_BYTES, follow_symlinks=False).splitlines(keepends=True):
                return False
            file.write(line)
    except OSError:
        pass
    return True


class SlowStartNotes(NodeSide):
    """Observer that shows why the zygote did not preload all imports, does not fork, or why ranks started over."""

    def __init__(self, zygote_plan: ZygotePlan, source: str | None, show_note: Callable[[str], None]) -> None:
        """``source``: the program's file."""
        self._plan, self._source, self._show_note = zygote_plan, source, show_note
        self._had_packages = False  # besides torch
        self._has_mismatch = False  # whether an import did not fit: only the first one is shown

    def observe(self, event: Event) -> None:
        if isinstance(event, ImportMismatch):
            self._on_mismatch(event)
        if not isinstance(event, ZygoteReady):
            return
        self._had_packages = bool(self._plan.fallback) and event.modules != self._plan.fallback
        slow, because = None, event.because
        if (
            event.forks and because and because != self._plan.explain_exclusions(None)[0]
        ):  # else the fallback was not needed
            imported = f"preloading failed, only {join_names(event.modules)} was preloaded"
            slow = f"{imported}: {because}; --preload torch avoids the attempt"
        elif because and not (event.forks or event.unsafe):
            slow = f"each rank imports torch itself because of {because}"
            if "which sets " in because:
                slow += "; faster: set it in the shell"
            elif because.endswith(" when it imports torch"):
                slow += "; faster: `import torch` above that"
        if slow and record_if_new(self._source, slow):
            self._show_note(slow)
        if event.unsafe:
            self._show_note(f"ranks are not forked but started as new interpreters: {event.unsafe}")

    def _on_mismatch(self, event: ImportMismatch) -> None:
        if self._has_mismatch:
            return
        self._has_mismatch = True
        is_remembered = not self._plan.user_modules
        if is_remembered:
            remember_mismatch(self._source, PreloadMismatch(event.module, event.differs, self._had_packages))
        because = f"{event.module} was preloaded, and ranks cannot use it: {event.differs}"
        if event.outcome == "restarts":
            next_run = "the next run of this program imports it in each rank"
            self._show_note(f"{because}; they start over, {next_run if is_remembered else '--start exec avoids that'}")
        elif event.outcome == "continues":
            self._show_note(f"{because}, so they use it all the same; --start exec avoids that")
