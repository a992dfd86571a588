"""Draws a terminal as SVG: what a command shows on a pseudo-terminal, rendered by rich."""

from __future__ import annotations

import io
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping
from fcntl import ioctl
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from tests.conftest import clean_environment, ddplaunch_command

DOCS = Path(__file__).parent.parent.parent / "docs"
FOLDER = "/home/ada"
COLUMNS = 84

# rich's own form loads fonts from a CDN.
FORM = """\
<svg class="{unique_id}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" \
aria-label="LABEL">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def drawing(folder: Path, name: str, label: str, words: tuple[str, ...], variables: Mapping[str, str]) -> str:
    """Type ``ddplaunch`` and these words in this folder, and return what the terminal showed, as a drawing."""
    shown = _show(folder, words, variables).rstrip()
    printed = f"$ ddplaunch {' '.join(words)}\n{shown}".replace(str(folder), FOLDER)
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True)
    for line in Text.from_ansi(printed).split():
        for part in line.divide(range(COLUMNS, len(line), COLUMNS)):  # as a terminal breaks a line
            console.print(part, soft_wrap=True)
    drawn = console.export_svg(title="", code_format=FORM.replace("LABEL", label), unique_id=name)
    return "".join(f"{line.strip()}\n" for line in drawn.splitlines() if line.strip())


def _show(folder: Path, words: tuple[str, ...], variables: Mapping[str, str]) -> str:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = clean_environment({"TERM": "xterm-256color", "CUDA_VISIBLE_DEVICES": "", **variables})
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            ddplaunch_command(*words),
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        try:
            while more := terminal.read(1 << 16):
                shown += more
        except OSError:  # EIO: nobody has the terminal any more
            pass
    process.wait()
    return shown.decode().replace("\r\n", "\n")


def lines(drawing: str) -> list[str]:
    """Return the lines of text in a drawing."""
    texts = [each for each in ElementTree.fromstring(drawing).iter() if each.tag.endswith("}text")]
    rows = groupby(texts, lambda each: each.get("y"))
    return ["".join(each.text or "" for each in row).replace("\xa0", " ").rstrip() for _, row in rows]
