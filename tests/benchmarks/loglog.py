"""Draws a plot with two logarithmic axes as plain SVG, and fits the exponent of a power law."""

import math
from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 460, 60, 230, 20, 45
MARGIN = 20  # for long numbers in a wide font
COLOURS = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#b9770e")

Points = list[tuple[float, float]]


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """The power of x with which y grows, by least squares; None where there are too few points, or zeros."""
    if len(points) < 2 or any(y <= 0 for _, y in points):
        return None
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (sum(each) / len(logs) for each in zip(*logs, strict=True))
    spread = sum((x - x_mean) ** 2 for x, _ in logs)
    return sum((x - x_mean) * (y - y_mean) for x, y in logs) / spread if spread else None


def draw(curves: dict[str, Points], x_title: str) -> str:
    """One line a curve, named at its right; of as many again the second half has the first's colours, dashed."""
    shown = {name: [point for point in points if point[1] > 0] for name, points in curves.items()}
    xs = [math.log10(x) for points in shown.values() for x, _ in points]
    ys = [math.log10(y) for points in shown.values() for _, y in points]
    x_low, x_high, y_low, y_high = min(xs), max(xs) + 0.01, math.floor(min(ys)), math.ceil(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        up = (math.log10(y) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return LEFT + across, HEIGHT - BOTTOM - up

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-MARGIN} 0 {MARGIN + WIDTH} {HEIGHT}" font-family="sans" '
        'font-size="12">',
        f'<rect x="{-MARGIN}" width="{MARGIN + WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_title}</text>',
    ]
    for power in range(y_low, y_high + 1):
        y = place(10**x_low, 10.0**power)[1]
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,.10g}</text>')
    for x in sorted({x for points in shown.values() for x, _ in points}):
        across = place(x, 10.0**y_low)[0]
        out.append(f'<path d="M{across:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
        out.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:,.0f}</text>')
    for index, (name, points) in enumerate(shown.items()):
        colour, dashes = COLOURS[index % len(COLOURS)], ' stroke-dasharray="5 4"' if index >= len(COLOURS) else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        line, y = f'fill="none" stroke="{colour}" stroke-width="2"{dashes}', TOP + 14 + 22 * index
        out.append(f'<polyline points="{path}" {line}/>')
        out.append(f'<path d="M{WIDTH - RIGHT + 14} {y - 4}h26" {line}/>')
        out.append(f'<text x="{WIDTH - RIGHT + 46}" y="{y}">{name}</text>')
    return "\n".join([*out, "</svg>\n"])
