"""docs/failure.svg: a job of four ranks in a terminal, one of which fails, and the report.

The job is real, and so is the terminal (a pseudo-terminal). What comes out of it is drawn by rich, without fonts from
elsewhere; of what is shown only the folder's name is another.
"""

from __future__ import annotations

import io
import os
import pty
import struct
import subprocess
import termios
from fcntl import ioctl
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from tests.conftest import clean_environment, command

PICTURE = Path(__file__).parent.parent.parent / "docs" / "failure.svg"
WORDS = ("run", "train.py", "--nproc", "4")
FOLDER = "/home/ada"
COLUMNS = 84

# The other ranks are at work when one fails, and not in a collective, whose error would race with their being stopped.
PROGRAM = """\
import time

import torch
import torch.distributed as dist


def check(batch):
    if batch == 30 and rank == 2:
        raise ValueError(f"batch {batch} has no labels")


dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()} trains on shard {rank}", flush=True)
for batch in range(40):
    check(batch)
    time.sleep(2 if batch == 30 else 0)
    loss = torch.tensor(1 / (batch + 1))
    dist.all_reduce(loss)
    if rank == 0 and batch in (10, 20):
        print(f"batch {batch}: loss {loss / 4:.3f}", flush=True)
"""

# rich's own form loads fonts from a CDN.
FORM = """\
<svg class="{unique_id}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" \
aria-label="A terminal: ddplaunch run train.py --nproc 4; rank 2 fails, and the report names it">
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


def picture(folder: Path) -> str:
    """Run the job in this folder, and return what its terminal showed, as a drawing."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    printed = f"$ ddplaunch {' '.join(WORDS)}\n{run(folder).rstrip()}".replace(str(folder), FOLDER)
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True)
    console.print(Text.from_ansi(printed), soft_wrap=True, end="")
    drawn = console.export_svg(title="", code_format=FORM, unique_id="failure")
    return "".join(f"{line.strip()}\n" for line in drawn.splitlines() if line.strip())


def run(folder: Path) -> str:
    """Run the job in a terminal; return what that has shown at its end."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = clean_environment({"TERM": "xterm-256color", "CUDA_VISIBLE_DEVICES": ""})
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        job = subprocess.Popen(
            command(*WORDS),
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
    job.wait()
    return shown.decode().replace("\r\n", "\n")


def lines(drawing: str) -> list[str]:
    """The lines that a drawing shows."""
    texts = [each for each in ElementTree.fromstring(drawing).iter() if each.tag.endswith("}text")]
    rows = groupby(texts, lambda each: each.get("y"))
    return ["".join(each.text or "" for each in row).replace("\xa0", " ").rstrip() for _, row in rows]
