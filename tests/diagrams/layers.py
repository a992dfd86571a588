"""docs/layers.svg: the packages of ddplaunch, each above all that it may import.

The layers are those of tests/test_imports.py, which enforces them. Each package is described here in a few words, and
on its first page (``__init__.py``).
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import ddplaunch
from tests.test_imports import LAYERS

PICTURE = Path(__file__).parent.parent.parent / "docs" / "layers.svg"

CONTENTS = {
    "base": {"base": "event loop, errors, text, files, sockets, message types: knows nothing of jobs"},
    "system": {
        "target": "what to run",
        "plan": "what runs where",
        "clusters": "cluster variables",
        "devices": "CPUs and GPUs",
        "schedulers": "batch jobs",
        "network": "addresses, ports",
    },
    "core": {
        "job": "decisions",
        "node": "ranks of a node",
        "net": "between nodes",
        "rank": "inside ranks",
        "output": "lines and events",
        "control_socket": "a job's status",
    },
    "cli": {"cli": "the command line of run: options, planning, launching; torchrun's dialect"},
}
"""What each package holds, in words that fit, by layer."""

PACKAGE = Path(ddplaunch.__file__).parent
WIDTH, HEIGHT, GAP, LABEL = 760, 42, 6, 60
STYLE = """\
.layers { color: var(--md-typeset-color, #24292f); max-width: 760px }
.layers text { fill: currentColor; font: 12px system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif }
.layers text { text-anchor: middle }
.layers .title { font-weight: 600; font-size: 13px }
.layers .ours { fill: #2f81f7; fill-opacity: .14; stroke: #2f81f7 }
.layers .yours { fill: #2da44e; fill-opacity: .14; stroke: #2da44e }
.layers .ground { fill: none; stroke: currentColor; stroke-opacity: .5 }
@media (prefers-color-scheme: dark) { .layers { color: var(--md-typeset-color, #d1d7e0) } }"""


def layers() -> str:
    """The picture: features at the top, the base below all."""
    drawn: list[str] = []
    top = GAP
    for layer in reversed(LAYERS):
        if layer == "features":
            names = _features()
            half = len(names) // 2
            boxes = {f"features/ ({len(names)})": f"{', '.join(names[:half])},", "": ", ".join(names[half:])}
            drawn += _box("ours", GAP, top, WIDTH - 2 * GAP, *next(iter(boxes.items())))
            drawn.append(f'<text x="{WIDTH / 2:g}" y="{top + 50}">{escape(boxes[""], quote=False)}</text>')
            drawn[0] = drawn[0].replace(f'height="{HEIGHT}"', f'height="{HEIGHT + 16}"')
            top += HEIGHT + 16 + GAP
            continue
        packages = CONTENTS[layer]
        folders = {each.name for each in (PACKAGE / layer).iterdir() if (each / "__init__.py").exists()}
        assert layer in ("base", "cli") or set(packages) == folders, f"CONTENTS has no words for {folders}"
        left = GAP
        if len(packages) > 1:
            left += LABEL
            drawn.append(f'<text class="title" x="{LABEL / 2:g}" y="{top + HEIGHT / 2 + 4:g}">{layer}/</text>')
        width = (WIDTH - left - GAP * len(packages)) / len(packages)
        for place, (name, text) in enumerate(packages.items()):
            look = "yours" if name == "rank" else "ground" if layer == "base" else "ours"
            drawn += _box(look, left + place * (width + GAP), top, width, f"{name}/", text)
        top += HEIGHT + GAP
    label = "The packages, bottom layer first; imports run downward only"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="layers" viewBox="0 0 {WIDTH} {top}" role="img"'
        f' aria-label="{label}">\n<style>\n{STYLE}\n</style>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _box(look: str, left: float, top: float, width: float, title: str, text: str) -> list[str]:
    middle = f"{left + width / 2:g}"
    return [
        f'<rect class="{look}" x="{left:g}" y="{top}" width="{width:g}" height="{HEIGHT}" rx="4"/>',
        f'<text class="title" x="{middle}" y="{top + 18}">{escape(title, quote=False)}</text>',
        f'<text x="{middle}" y="{top + 34}">{escape(text, quote=False)}</text>',
    ]


def _features() -> list[str]:
    return sorted(each.name for each in (PACKAGE / "features").iterdir() if (each / "__init__.py").exists())
