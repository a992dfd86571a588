"""Renders a page of the documentation for a terminal; imported only there, as rich takes longer than all other help."""

from __future__ import annotations

import io
import re
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown
from rich.syntax import Syntax
from rich.theme import Theme

MAX_COLUMNS = 100  # longer lines are hard to read

_THEME = Theme(
    {
        "markdown.h1": "bold green",
        "markdown.h2": "bold green",
        "markdown.h3": "bold",
        "markdown.code": "cyan",
        "markdown.code_block": "cyan",
    }
)


def render_page(markdown: str, columns: int, *, colour: bool) -> str:
    """Return the text of a page for a terminal of this width, with ANSI styles if ``colour``."""
    console = Console(
        file=io.StringIO(),
        width=min(columns, MAX_COLUMNS),
        force_terminal=colour,
        color_system="standard" if colour else None,
        theme=_THEME,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(_Page(_without_html_and_links(markdown), hyperlinks=False), crop=False)
    return re.sub(r"[ \t]+(?=\n)", "", captured.get())


class _Code(CodeBlock):
    """A code block, indented, on the terminal's background; its lines are not wrapped, so that users can copy them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        syntax = Syntax("", self.lexer_name, theme="ansi_light", background_color="default")
        text = syntax.highlight("".join(f"  {line}\n" for line in str(self.text).rstrip().splitlines()))
        text.no_wrap, text.overflow = True, "ignore"
        yield text


class _Page(Markdown):
    elements: ClassVar = {**Markdown.elements, "fence": _Code, "code_block": _Code}


def _without_html_and_links(markdown: str) -> str:
    """Remove pictures and HTML from Markdown, and replace links by their text or the name of a help page."""
    text = re.sub(r"<!--.*?-->|^<[^>\n]*>$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)(\{[^}\n]*\})?", "", text)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", _replace_link, text)


def _replace_link(found: re.Match[str]) -> str:
    text, address = found[1], found[2]
    if address.startswith("#"):
        return text
    if page := re.fullmatch(r"(?:\.\./)?(?:docs/)?([\w-]+)\.md(#.*)?", address):
        return text if text.lower().replace(" ", "-") == page[1].lower() else f"{text} (`help {page[1]}`)"
    return f"{text} ({address})" if "://" in address else text
