"""Loads the templates of the pages, which escape all values, also control characters; their style sheet and script."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from functools import cache
from typing import TYPE_CHECKING

from ddplaunch.base.errors import escape_control_chars

if TYPE_CHECKING:
    from jinja2 import Template


@cache
def load_template(name: str) -> Template:
    """Load a template of this folder; it is an error to render it without one of its values."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # 15 ms, and most reports are text

    return Environment(
        loader=FunctionLoader(_read_template),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_show_control_chars,
    ).get_template(name)


def _read_template(name: str) -> str:
    """Read a template, and put its line breaks in comments: only line breaks of the data get into the page."""
    return re.sub(r"\n\s*", "{#\n#}", _read(name))


def _show_control_chars(value: object) -> object:
    """Return the text of a value with escapes for control characters; markup, like that of a macro, stays as it is."""
    return value if hasattr(value, "__html__") else escape_control_chars(str(value))


def _read(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name), encoding="utf-8") as file:
        return file.read()


STYLE, SCRIPT = "\n" + _read("page.css"), "\n" + _read("page.js")
SCRIPT_HASH = f"sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}"
"""For the content security policy: a browser runs no other script."""
