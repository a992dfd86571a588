"""Builds HTML; text that is not ``Markup`` is escaped, as names come from users. Also the style sheet."""

from __future__ import annotations

import html
from collections.abc import Iterable

from ddplaunch.base.errors import escape_control_chars

_EMPTY = {"line", "meta", "rect"}  # HTML wants no slash in a meta and does not mind, SVG needs it


class Markup(str):
    """Text that is HTML already, and is not escaped."""


def element(name: str, /, *content: str, **attributes: object) -> Markup:
    """Build an element; a trailing underscore of an attribute is removed, others become dashes; None leaves it out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            text = html.escape(escape_control_chars(str(value)), quote=True)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{text}"')
    inside = "".join(map(escape, content))
    return Markup(f"<{' '.join(words)}/>" if name in _EMPTY else f"<{' '.join(words)}>{inside}</{name}>")


def escape(text: str) -> str:
    """Escape text for HTML; control characters are shown as their escapes."""
    return text if isinstance(text, Markup) else html.escape(escape_control_chars(text))


def concat(*parts: str) -> Markup:
    """Join text and markup."""
    return Markup("".join(map(escape, parts)))


def table(heads: list[str], rows: list[list[str]], **attributes: object) -> Markup:
    """Build a table that scrolls if it is too wide."""
    head = element("thead", element("tr", *(element("th", each, scope="col") for each in heads)))
    body = element("tbody", *(element("tr", *(element("td", each) for each in row)) for row in rows))
    return element("div", element("table", head, body), class_="scrolls", **attributes)


def section_with_heading(title: str, *content: str, id: str) -> Markup:
    """Build a section of the page with a heading."""
    return element("section", element("h2", title), *content, id=id)


def definition_list(rows: Iterable[tuple[str, str]]) -> Markup:
    """Build a list of names and values."""
    return element("dl", *(part for name, value in rows for part in (element("dt", name), element("dd", value))))


STYLE = """
:root {
  --text: #1c2024; --dim: #60646c; --back: #ffffff; --box: #f6f7f8; --rule: #d9dce0;
  --well: #2b9a66; --failed: #d13415; --fell: #e89a5b; --stopped: #9ba1a8; --running: #3e7bd6; --unknown: #c9ced4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e6e8ea; --dim: #a0a6ad; --back: #14171a; --box: #1e2226; --rule: #363c42;
    --well: #3dab78; --failed: #f0664a; --fell: #c9793a; --stopped: #767d85; --running: #6a9fe8; --unknown: #454b52;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--text); background: var(--back);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; }
h2 { font-size: 1.1rem; margin: 0 0 0.6rem; }
header p { margin: 0.2rem 0; }
section { margin: 1.6rem 0; }
footer, .dim, header p:last-child { color: var(--dim); }
.fate { font-size: 0.9rem; padding: 0.15rem 0.6rem; border-radius: 1rem; color: var(--back); vertical-align: middle; }
.fate.well, i.well { background: var(--well); } .fate.failed, i.failed { background: var(--failed); }
.fate.stopped, i.stopped { background: var(--stopped); } .fate.running, i.running { background: var(--running); }
i.fell { background: var(--fell); } i.unknown { background: var(--unknown); }
rect.well { fill: var(--well); } rect.failed { fill: var(--failed); } rect.fell { fill: var(--fell); }
rect.stopped { fill: var(--stopped); } rect.running { fill: var(--running); } rect.unknown { fill: var(--unknown); }
rect.attempt { fill: var(--box); }
g:hover > rect:not(.attempt) { opacity: 0.7; }
.mark line { stroke: var(--text); stroke-dasharray: 3 3; } .tick { stroke: var(--dim); }
.still { fill: var(--unknown); opacity: 0.5; } .hover { fill: transparent; }
.hover:hover { fill: var(--dim); opacity: 0.15; }
.line { fill: none; stroke: var(--running); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.band { fill: var(--running); opacity: 0.25; } .base { stroke: var(--rule); } svg text.title { fill: var(--text); }
.small { width: 6rem; height: 1.2rem; display: block; overflow: visible; }
input[type=search] { width: 100%; max-width: 30rem; padding: 0.4rem 0.6rem; font: inherit; color: inherit;
  background: var(--box); border: 1px solid var(--rule); border-radius: 6px; }
#output pre { max-height: 24rem; overflow: auto; margin: 0.4rem 0; } summary i { color: var(--running); }
svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
.chart { display: flex; gap: 0.5rem; margin: 0.5rem 0 1rem; }
.chart svg { display: block; } .labels { flex: none; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; list-style: none; padding: 0; margin: 0; }
.legend i { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px; margin-right: 0.4rem; }
.headline { color: var(--failed); font-weight: 600; margin: 0 0 0.5rem; }
code, pre, .stack { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; }
pre { background: var(--box); padding: 0.8rem; margin: 0; overflow-x: auto; border-radius: 6px; overflow-wrap: normal; }
details, .stackless { border: 1px solid var(--rule); border-radius: 6px; padding: 0.4rem 0.8rem; margin: 0.5rem 0; }
summary { cursor: pointer; }
.stack { margin: 0.4rem 0; padding-left: 2.2rem; color: var(--dim); } .stack .own { color: var(--text); }
.stack .own code { font-weight: 600; }
.waits { padding-left: 1.2rem; }
.scrolls { overflow-x: auto; max-height: 40rem; overflow-y: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; color: var(--dim); font-weight: 500; position: sticky; top: 0; background: var(--back); }
th, td { padding: 0.2rem 0.9rem 0.2rem 0; border-bottom: 1px solid var(--rule); overflow-wrap: normal; }
td { font-variant-numeric: tabular-nums; vertical-align: top; } #resources td { white-space: nowrap; }
.meter { display: inline-block; width: 5rem; height: 0.6rem; margin-right: 0.6rem; background: var(--box);
  border-radius: 2px; } .meter i { display: block; height: 100%; background: var(--running); border-radius: 2px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.2rem; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; min-width: 0; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 0.5rem; } }
@media print { .scrolls { max-height: none; } }
"""
"""For light and dark screens, wide and narrow ones, and paper."""
