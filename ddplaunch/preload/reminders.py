"""Which notes on a program's start were shown before: each comes once for a program, until its file changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from zlib import crc32

from ddplaunch.files import open_for_writing, read_regular_file
from ddplaunch.words import join_names

_MAX_SOURCE, _MAX_KEPT = 64 << 20, 1 << 20  # bytes


def is_new(path: str | None, note: str) -> bool:
    """Whether a note on the program at ``path`` was not shown yet, or that cannot be kept; from now on it was."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    kept = os.path.join(state, "ddplaunch", "noted")
    try:
        path = os.path.abspath(path or "")
        text = f"{path}\0{note}\0".encode(errors="replace")
        line = b"%08x %08x\n" % (crc32(text), crc32(read_regular_file(path, _MAX_SOURCE)))
        os.makedirs(os.path.dirname(kept), 0o700, exist_ok=True)
        with open(open_for_writing(kept, os.O_APPEND, 0o600), "ab") as file:
            if line in read_regular_file(kept, _MAX_KEPT, follow_symlinks=False).splitlines(keepends=True):
                return False
            file.write(line)
    except OSError:
        pass
    return True


def note_slow_start(
    note: Callable[[str], None],
    source: str | None,
    modules: Sequence[str],
    because: str | None,
    *,
    forks: bool,
    failed: str | None,
    unsafe: str | None,
) -> None:
    """Note why ranks import themselves what is usually imported once for all of them, as ``events.Ready`` has it."""
    slow = None
    if failed and forks:
        slow = f"only {join_names(modules)} could be imported for all ranks: {failed}; --preload torch starts at once"
    elif because and not (forks or unsafe):
        named_variable = "which sets " in because and "sets variables" not in because  # --preload torch minds it too
        avoid = "set it in the shell" if named_variable else "--preload torch, or `import torch` above that"
        slow = f"each rank imports torch itself, after {because}; faster: {avoid}"
    if slow and is_new(source, slow):
        note(slow)
    if unsafe:
        note(f"ranks start one by one instead of being forked: {unsafe}")
