"""Builds HTML; text that is not ``Markup`` is escaped, as names come from users. Also the style sheet and script."""

from __future__ import annotations

import base64
import hashlib
import html
import os
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


def _read(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return "\n" + file.read()


STYLE, SCRIPT = _read("page.css"), _read("page.js")
SCRIPT_HASH = f"sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}"
"""For the content security policy: a browser runs no other script."""
