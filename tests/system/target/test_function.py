"""Tests of finding what a name in a module is bound to, from the source alone."""

from __future__ import annotations

import ast
import textwrap

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.target.function_lookup import find_function


def look(source: str, name: str = "main") -> str | None:
    signature = find_function(f"m.py:{name}", "m.py", name, ast.parse(textwrap.dedent(source)))
    return None if signature is None else str(signature)


def test_a_plain_function_is_read():
    assert look("def main(rank, *, lr: float = 0.1, **more): pass") == "main(rank, lr: float = 0.1, **more)"


@pytest.mark.parametrize(
    "source",
    [
        "@decorated\ndef main(): pass",
        "from impl import main",
        "from impl import run as main",
        "from impl import *",
        "main = make()",
        "main = lambda rank: None",
        "main = partial(run, 3)",
        "main: Callable = make()",
        "first, main = make()",
        "if x:\n    def main(a): pass\nelse:\n    def main(b): pass",
        "if x:\n    def main(a): pass",
        "try:\n    from fast import main\nexcept ImportError:\n    def main(): pass",
        "with x as main: pass",
        "for main in functions: pass",
        "match x:\n    case 1:\n        def main(): pass",
        "(main := make())",
        "def main(): pass\nmain = decorate(main)",
        "def __getattr__(name): return run",
    ],
)
def test_functions_that_only_ranks_can_find(source):
    assert look(source) is None


def test_attributes_are_left_to_the_ranks():
    assert look("class Trainer:\n    def run(): pass", "Trainer.run") is None
    with pytest.raises(UsageError, match=r"has no function Trianer\.run"):
        look("class Trainer:\n    def run(): pass", "Trianer.run")


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("def mian(): pass", "m.py has no function main", "did you mean m.py:mian?"),
        ("def x(): pass\ndef y(): pass", "m.py has no function main", "its functions: x, y"),
        ("", "m.py has no function main", None),
        ("def outer():\n    def main(): pass", "m.py has no function main", "its functions: outer"),
        ("class A:\n    def main(self): pass", "m.py has no function main", None),
        ("async def main(): pass", "m.py:main is a coroutine function", "asyncio.run"),
        ("class main: pass\ndef run(): pass", "m.py:main is a class, not a function", "its functions: run"),
        ("main = 3", "m.py:main is not a function: main = 3", None),
        ("main = {'a': 1}", "m.py:main is not a function: main = {'a': 1}", None),
        ("main: str = 'x'", "m.py:main is not a function: main: str = 'x'", None),
        ("import main", "m.py:main is not a function: import main", None),
        ("import train.loop as main", "m.py:main is not a function: import train.loop as main", None),
    ],
)
def test_other_objects_are_not_functions(source, message, hint):
    with pytest.raises(UsageError) as refusal:
        look(source)
    assert refusal.value.message == message
    assert (hint in (refusal.value.hint or "")) if hint else refusal.value.hint is None
