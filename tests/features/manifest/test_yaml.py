"""Tests that written YAML is read back unchanged by parsers of YAML 1.1 (PyYAML, kubectl's) and 1.2 (ruamel)."""

import io
import itertools

import pytest
import yaml as pyyaml
from ruamel.yaml import YAML

from ddplaunch.base.errors import UsageError
from ddplaunch.features.manifest.yaml_writer import with_comment, write_yaml

WORDS = """
    y Y yes Yes no NO on off true True TRUE false null Null NULL ~ none None nan inf .nan .inf -.inf
    0 1 -1 +1 007 0o7 0x1f 0b1 1_000 1e3 1E3 -1e-3 .5 1. 1.5 1:30 190:20:30 2026-11-21 2026-11-21T10:00:00Z
    = << - -- --- ... ? : , [ ] { } [] {} # & * ! | > % @ ` ' " \\ / a: :a a:b a:1 12:a a#b #a a: -a -1a -e3
    --lr --lr=0.1 &a *a !a !!str |a >a %a @a `a 'a' "a" 'a "a it's $HOME $(HOME) $$ ${HOME} `x` !x key:value http://x:80/y?z=1#f
    nvcr.io/nvidia/pytorch:25.01-py3 /dev/shm ./a ../a a/b. a@b a=b =a a+b <a> a|b a&b a;b ü 日本 🚀 é́ _a __init__
"""

SPACES = ["", " ", "  ", " a", "a ", "a b", "a: b", "a #b", "- a", "? a", "a\tb", "\t", "\ta"]
BREAKS = ["a\n", "\n", "\na", "a\nb\n\nc", "\r", "a\r\nb", "\x85", "\u2028", "\u2029", "a\n b", " a\nb", "a \nb"]
CONTROLS = ["\x01", "\x07", "\x1b[31m", "\x7f", "\xa0", "\ufeff", "\ufeffa", "\uffff"]
QUOTES = ["\\n", "\\", "\\\\", '\\"', "\\x41", '"', '""', "'", "''", "a\\", "%TAG ! x", "x" * 300, "a " * 100, "🚀" * 3]
LINES = ['{"a": [1, "b"]}', "key: [a, b]", "--- a", "... a", "a --- b", "- - a", "!!python/object:os.system x"]

NASTY = [*WORDS.split(), *SPACES, *BREAKS, *CONTROLS, *QUOTES, *LINES]


def old(text: str) -> object:
    return pyyaml.safe_load(text)


def new(text: str) -> object:
    return YAML(typ="safe", pure=True).load(io.StringIO(text))


READERS = pytest.mark.parametrize("read", [old, new])


@READERS
@pytest.mark.parametrize("text", NASTY, ids=ascii)
def test_a_string_is_that_string(read, text):
    """A string is read back unchanged as a value, as a key, and in short and long lists."""
    meant = {"a": text, text or "k": "a", "b": [text, "x"], "c": [{"d": text}], "e": [text] * 60, "f": {text: text}}
    assert read(write_yaml(meant)) == meant


@READERS
def test_neighbours_do_not_matter(read):
    for one, other in itertools.pairwise([*NASTY, *reversed(NASTY)]):
        meant = {"line": [one, other], "lines": [one, other, "x" * 120], "pair": {"a": one, "b": other}}
        assert read(write_yaml(meant)) == meant


@READERS
def test_numbers_and_booleans_keep_their_types(read):
    meant = {"a": 0, "b": -3, "c": True, "d": False, "e": [1, True, "1", "true"], "f": [{"g": 1, "h": [{"i": "1"}]}]}
    assert read(write_yaml(meant)) == meant


def test_comments_are_only_comments():
    meant = {
        with_comment("a", "of a: 1\nsecond line"): {with_comment("b", "of b"): [1, 2]},
        "c": [{with_comment("d", "of the first"): 1, with_comment("x", "inside"): "z"}, {"e": 2}, "f"],
    }
    text = write_yaml(meant)
    assert old(text) == new(text) == meant
    assert text.splitlines() == [
        "# of a: 1",
        "# second line",
        "a:",
        "  # of b",
        "  b: [1, 2]",
        "c:",
        "  # of the first",
        "  - d: 1",
        "    # inside",
        "    x: z",
        "  - e: 2",
        "  - f",
    ]


def test_nothing_is_quoted_without_need():
    words = ["python", "--lr", "--lr=0.1", "-m", "nvcr.io/nvidia/pytorch:25.01-py3", "/dev/shm", "wine-0.wine", "_a"]
    lines = write_yaml({"a": [*words[:-1], "x" * 120]}).splitlines()[1:-1]
    assert [line.strip() for line in lines] == [f"- {word}" for word in words[:-1]]


@pytest.mark.parametrize("text", ["\udcff", "a\0b"])
def test_text_that_yaml_cannot_hold_is_refused(text):
    with pytest.raises(UsageError, match="a manifest cannot hold"):
        write_yaml({"a": [text]})
