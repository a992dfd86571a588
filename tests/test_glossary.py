"""Tests that the terms of CONTRIBUTING.md and the names in How it works are those of the code."""

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import ddplaunch
from ddplaunch.core import messages
from ddplaunch.core.feature_registry import load_features

PACKAGE = Path(ddplaunch.__file__).parent
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"

NOT_IN_NAMES = {
    *("`on_x`", "cluster environment", "connectivity", "control link", "control message"),
    *("plug-in", "streaming request", "unrelated process", "user error"),
}
"""Terms that are a pattern, or that only docstrings, comments and messages use."""


def names(path: Path) -> Iterator[str]:
    """Every identifier in a source file, each time that it is used."""
    with io.StringIO(path.read_text(encoding="utf-8")) as source:
        yield from (token.string for token in tokenize.generate_tokens(source.readline) if token.type == tokenize.NAME)


def words(name: str) -> list[str]:
    """``_RankChannel`` and ``RANK_CHANNEL`` are rank and channel."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


@cache
def identifiers() -> dict[Path, Counter[str]]:
    return {path: Counter(names(path)) for path in sorted(PACKAGE.rglob("*.py"))}


def terms() -> list[str]:
    """The terms in the first column of the table under "Code terms"."""
    section = CONTRIBUTING.read_text(encoding="utf-8").partition("## Code terms\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)
    return [term for cell in cells[1:] for term in re.split("[;,] ", cell)]


def test_each_term_is_in_a_name():
    spelled = {" ".join(words(name)) for used in identifiers().values() for name in used}
    spelled |= {" ".join(words(name)) for path in identifiers() for name in path.parts[-2:]}
    text = "\n".join(spelled)
    missing = [term for term in terms() if term not in NOT_IN_NAMES and term not in text]
    assert len(terms()) > 80
    assert missing == []


def test_how_it_works_names_what_exists():
    """Each name in code marks with a capital inside is a class of the package; each control message has its row."""
    page = (PACKAGE.parent / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    known = {name for used in identifiers().values() for name in used}
    assert [name for name in re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", page) if name not in known] == []
    bases = (messages.Message, messages.FromNode, messages.FromNodeZero)
    of_all_features = [kind for base in bases for kind in load_features().message_types(base)]
    sent = {kind.__name__ for kind in of_all_features if not kind.__subclasses__()}
    assert [name for name in sorted(sent) if f"`{name}`" not in page] == []
