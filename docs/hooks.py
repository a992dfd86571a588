"""What the site needs of pages that are written for GitHub too (mkdocs.yml names this file).

README*.md, CONTRIBUTING.md and CHANGELOG.md stand above docs/ and become pages of the site, README.md its home page;
links to and from them are turned accordingly. Drawings are put into the page, so that their text can be selected and
searched.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent

ABOVE = {
    "README.md": "index.md",
    "README.zh-CN.md": "readme.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages above docs/, and what they are called in the site."""

FENCE = re.compile(r"^( *```)(\w+) \S+=\S+$", re.MULTILINE)
"""``console gpus=4`` is for tests/test_readme.py."""

ROW = re.compile(r"^\|.*\\\|.*$", re.MULTILINE)
"""A row of a table with an escaped bar: GitHub wants that in code too, Python-Markdown would show the backslash."""

DRAWING = re.compile(r'<img [^>]*?src="([\w-]+\.svg)"[^>]*>')


def on_files(files: Any, config: Any) -> Any:
    for name, page in ABOVE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    above = page.file.src_uri in ABOVE.values()
    if above:
        markdown = markdown.replace("](docs/", "](")
    for name, inside in ABOVE.items():
        markdown = markdown.replace(f"]({name}" if above else f"](../{name}", f"]({inside}")
    markdown = ROW.sub(lambda row: re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    return FENCE.sub(r"\1\2", markdown)


def on_page_content(html: str, **_: Any) -> str:
    return DRAWING.sub(lambda image: (ROOT / "docs" / image[1]).read_text(encoding="utf-8"), html)
