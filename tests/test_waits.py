"""Tests that tests wait for conditions, and that what is skipped says why."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def calls(*names: str) -> Iterator[tuple[str, ast.Call, str]]:
    """Every call of these functions in a test file: its place, and the line on which it begins."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(text)) if any(name in text for name in names) else ()
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield f"{path.relative_to(TESTS)}:{node.lineno}", node, text.splitlines()[node.lineno - 1]


def test_sleeping_is_not_synchronisation():
    """Where time itself is the subject, a comment on the line says so."""
    found = [place for place, _, line in calls("time.sleep") if "  # " not in line]
    assert found == [], "wait_until() in tests/conftest.py waits for a condition"


def test_every_skip_has_a_reason():
    marks = calls("pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail")
    found = [place for place, node, _ in marks if "reason" not in [keyword.arg for keyword in node.keywords]]
    found += [place for place, node, _ in calls("pytest.skip", "pytest.xfail") if not node.args]
    assert found == []
    unreported = [place for place, _, _ in calls("pytest.importorskip")]  # of a whole file
    assert unreported == [], "requires() in tests/frameworks/launchers.py says what to install"
