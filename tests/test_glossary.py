"""Tests that the terms of CONTRIBUTING.md and How it works are those of the code, and replaced words are gone."""

import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import ddplaunch
from ddplaunch.core import messages
from ddplaunch.core.feature import load_features

PACKAGE = Path(ddplaunch.__file__).parent
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"

REPLACED = {
    *("told", "tell", "tells", "hear", "hears", "heard", "hearer", "said", "patience", "garbled", "unborn", "asker"),
    *("nobody", "somebody", "whoever", "stranger"),
}
"""Words that a term replaced and that mean nothing else in this program, each as a word or a part of a name."""

IN_JSON = {"stranger"}
"""Values of the ``--json`` output of doctor, which stay."""

RIDDLES = re.compile(
    r"\b(stands behind|of late|meant by|gets on|[Ss]o many|none that)\b"
    r"|(?<!there )(?<!There )\bis no (?!longer|more)[a-z]+"
)
"""Phrases that readers of another language stumbled over."""

NOT_IN_NAMES = {
    *("`on_x`", "cluster environment", "connectivity", "control link", "control message"),
    *("streaming request", "unrelated process", "user error"),
}
"""Terms that are a pattern, or that only docstrings, comments and messages use."""


def names(path: Path) -> Iterator[str]:
    """Every identifier in a source file, each time that it is used."""
    with io.StringIO(path.read_text(encoding="utf-8")) as source:
        yield from (token.string for token in tokenize.generate_tokens(source.readline) if token.type == tokenize.NAME)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every name, string and comment in a source file, with its line; not ``file.tell()``, a method of Python's."""
    with io.StringIO(path.read_text(encoding="utf-8")) as source:
        for token in tokenize.generate_tokens(source.readline):
            kind = tokenize.tok_name[token.type]
            if kind == "COMMENT" or "STRING" in kind or (kind == "NAME" and token.string != "tell"):
                yield token.start[0], token.string


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


def test_words_that_were_replaced_are_gone():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {', '.join(sorted(here))}"
        for path in identifiers()
        for line, text in texts(path)
        if (here := REPLACED.intersection(words(text)) - (set() if text.isidentifier() else IN_JSON))
    ]
    assert found == [], "CONTRIBUTING.md has the terms under Code terms"


def test_messages_and_pages_use_plain_phrases():
    """In the package and on every page, also where a phrase is split over two lines."""
    home = PACKAGE.parent
    pages = [*home.glob("*.md"), *(home / "docs").glob("*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in (*identifiers(), *pages)}
    found = {
        str(path.relative_to(home)): phrases
        for path, text in texts.items()
        if (phrases := [match[0] for match in RIDDLES.finditer(re.sub(r"[\s#]+", " ", text))])
    }
    assert found == {}


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
