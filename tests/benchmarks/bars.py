"""Draws horizontal bars as plain SVG, the longest first."""

from collections.abc import Mapping
from html import escape

WIDTH, LEFT, RIGHT, BAR, GAP = 760, 290, 70, 22, 12
OURS, OTHERS = "#1b6ca8", "#b0b7bd"


def draw(values: Mapping[str, float], unit: str, ours: str) -> str:
    """One bar for each name; those that begin with ``ours`` in a colour of their own."""
    longest = max(values.values())
    height = len(values) * (BAR + GAP) + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (name, value) in enumerate(sorted(values.items(), key=lambda each: -each[1])):
        y, long = GAP + number * (BAR + GAP), value / longest * (WIDTH - LEFT - RIGHT)
        colour = OURS if name.startswith(ours) else OTHERS
        out.append(f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR}" fill="{colour}"/>')
        out.append(f'<text x="{LEFT + long + 8:.1f}" y="{y + 16}">{value:.3g} {unit}</text>')
    return "\n".join([*out, "</svg>\n"])
