"""Tests that the terms of CONTRIBUTING.md and the names in How it works are those of the code."""

import ast
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
    page += CONTRIBUTING.read_text(encoding="utf-8").partition("## Messages between nodes\n")[2].partition("\n## ")[0]
    known = {name for used in identifiers().values() for name in used}
    assert [name for name in re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", page) if name not in known] == []
    bases = (messages.Message, messages.FromNode, messages.FromNodeZero)
    of_all_features = [kind for base in bases for kind in load_features().message_types(base)]
    sent = {kind.__name__ for kind in of_all_features if not kind.__subclasses__()}
    assert [name for name in sorted(sent) if f"`{name}`" not in page] == []


OTHER_WORDS = {
    "folder": r"(?<![.\w])director(y|ies)\b",  # not WorkingDirectory, --collector.textfile.directory
    "rank": r"\bprocesses per node",
    "run": r"\b(only running job|no running jobs|your jobs (here|on this machine)|only one job runs)\b",
}
"""What a user reads for a term, and other words for it."""


def shown_texts(path: Path) -> Iterator[str]:
    """The strings of a source file that may be shown: all but docstrings; those of commands are their help."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("command" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield " ".join(node.value.split())


def test_users_read_one_word_for_one_thing():
    texts = [(path.name, text) for path in identifiers() for text in shown_texts(path)]
    pages = [*PACKAGE.parent.glob("[RS]*.md"), *(PACKAGE.parent / "docs").rglob("*.md")]
    texts += [(path.name, " ".join(path.read_text(encoding="utf-8").split())) for path in pages]
    assert len(texts) > 5000
    found = [
        (place, term, match[0])
        for place, text in texts
        for term, others in OTHER_WORDS.items()
        for match in re.finditer(others, text)
    ]
    assert found == []


def loops_over(name: str, path: Path) -> Iterator[str]:
    """The loops of a file whose variable has this name and whose body has more than three lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.For) and (node.body[-1].end_lineno or 0) - node.body[0].lineno >= 3:
            variables = {target.id for target in ast.walk(node.target) if isinstance(target, ast.Name)}
            yield from (f"{path.relative_to(PACKAGE)}:{node.lineno}" for _ in variables & {name})


def test_the_variable_of_a_long_loop_says_what_it_is():
    """``each`` is enough where its whole loop can be seen at once."""
    assert [place for path in identifiers() for place in loops_over("each", path)] == []
