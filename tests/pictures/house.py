"""Draws docs/house.svg: the packages of ddplaunch, each above all that it may import.

The layers are those of tests/test_imports.py, which enforces them. Each package is described here in a few words, and
in full in CONTRIBUTING.md.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import ddplaunch
from tests.test_imports import LAYERS

PICTURE = Path(__file__).parent.parent.parent / "docs" / "house.svg"

HOLDS = {
    "target": "what to run, found without running it",
    "plan": "what will run where, frozen",
    "devices": "what this machine has",
    "clusters": "the cluster environment",
    "diagnosis": "who waits for whom, who is slow",
    "wire": "messages, their bounds, the proof of the token",
    "control": "the nodes of one job, joined",
    "rank": "what runs inside the user's processes",
    "preload": "which modules to import once for all ranks",
    "output": "output of ranks, events, screen",
    "warm": "zygotes that outlive a run",
    "agent": "runs one node: starts, watches and stops its ranks",
    "job": "a job from outside: status, control socket, history",
    "ssh": "reaching many machines",
    "queue": "batch jobs, from outside",
    "console": "text that users see of a run",
    "live": "the live view",
    "cli": "the command line of run: options, planning, launching",
    "commands": "all other commands: {}",
    "python": "launch, Session, the pytest plugin",
}
"""What each package holds, in words that fit."""

WIDTH, HEIGHT, GAP = 760, 42, 6
STYLE = """\
.house { color: var(--md-typeset-color, #24292f); max-width: 760px }
.house text { fill: currentColor; font: 12px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
.house text { text-anchor: middle }
.house .title { font-weight: 600; font-size: 13px }
.house .ours { fill: #2f81f7; fill-opacity: .14; stroke: #2f81f7 }
.house .yours { fill: #2da44e; fill-opacity: .14; stroke: #2da44e }
.house .ground { fill: none; stroke: currentColor; stroke-opacity: .5 }
@media (prefers-color-scheme: dark) { .house { color: var(--md-typeset-color, #d1d7e0) } }"""


def house() -> str:
    """Return the picture: commands at the top, the lowest layer at the bottom."""
    ground, *floors = LAYERS
    drawn: list[str] = []
    top = GAP
    for floor in reversed(floors):
        rooms = [name for name in HOLDS if name in floor]
        assert set(rooms) == floor, f"HOLDS has no words for {floor - set(rooms)}"
        width = (WIDTH - GAP * (len(rooms) + 1)) / len(rooms)
        for place, name in enumerate(rooms):
            look = "yours" if name == "rank" else "ours"
            drawn += _box(look, GAP + place * (width + GAP), top, width, f"{name}/", HOLDS[name].format(_commands()))
        top += HEIGHT + GAP
    files = ", ".join(f"{name}.py" for name in sorted(ground))
    share = (WIDTH - 3 * GAP) * 2 / 3
    drawn += _box("ground", GAP, top, share, files, "bottom layer: all may use it")
    rest = WIDTH - 3 * GAP - share
    drawn += _box("yours", share + 2 * GAP, top, rest, "runtime.py, submitit.py", "what user code may import")
    top += HEIGHT + GAP
    label = "The packages, bottom layer first; imports run downward only"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="house" viewBox="0 0 {WIDTH} {top}" role="img"'
        f' aria-label="{label}">\n<style>\n{STYLE}\n</style>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _box(look: str, left: float, top: float, width: float, title: str, text: str) -> list[str]:
    middle = f"{left + width / 2:g}"
    return [
        f'<rect class="{look}" x="{left:g}" y="{top}" width="{width:g}" height="{HEIGHT}" rx="4"/>',
        f'<text class="title" x="{middle}" y="{top + 18}">{escape(title, quote=False)}</text>',
        f'<text x="{middle}" y="{top + 34}">{escape(text, quote=False)}</text>',
    ]


def _commands() -> str:
    folder = Path(ddplaunch.__file__).parent / "commands"
    found = {each.stem for each in folder.iterdir() if each.stem[0] not in "_." and each.suffix in ("", ".py")}
    return ", ".join(sorted(found))
