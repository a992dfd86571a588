"""HTML from text: what is not markup already is escaped, so nothing that a user has named can be."""

from __future__ import annotations

import html

from ddplaunch.errors import harmless

_EMPTY = {"line", "meta", "rect"}  # HTML wants no slash in a meta and does not mind, SVG needs it


class Markup(str):
    """Text that is HTML, and goes into other HTML as it is."""


def tag(name: str, /, *content: str, **attributes: object) -> Markup:
    """An element; ``class_`` and the like lose their underscore, others become dashes. None leaves an attribute out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            text = html.escape(harmless(str(value)), quote=True)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{text}"')
    inside = "".join(map(escaped, content))
    return Markup(f"<{' '.join(words)}/>" if name in _EMPTY else f"<{' '.join(words)}>{inside}</{name}>")


def escaped(text: str) -> str:
    """The text as it stands in HTML; control characters are shown as their escapes."""
    return text if isinstance(text, Markup) else html.escape(harmless(text))


def joined(*parts: str) -> Markup:
    """Text and markup in a row."""
    return Markup("".join(map(escaped, parts)))


def table(heads: list[str], rows: list[list[str]], **attributes: object) -> Markup:
    """A table that scrolls by itself where it is too wide."""
    head = tag("thead", tag("tr", *(tag("th", each, scope="col") for each in heads)))
    body = tag("tbody", *(tag("tr", *(tag("td", each) for each in row)) for row in rows))
    return tag("div", tag("table", head, body), class_="scrolls", **attributes)
