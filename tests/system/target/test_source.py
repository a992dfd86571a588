"""Tests of reading source and finding modules without running them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.target.source import find_module, find_option_names, local_sources, parse_file
from tests.conftest import write_program

BOOM = "raise SystemExit('this must not run')\n"


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"x = (\n", "syntax error in s.py, line 1: '(' was never closed", "x = ("),
        (b"x = 1\nif x\n    y\n", "syntax error in s.py, line 2: expected ':'", "if x"),
        (b"x = 1\0\n", "s.py is not Python source: it contains a null byte", None),
        (b"x = '\xff'\n", "syntax error in s.py, line 1: (unicode error) 'utf-8' codec", None),
        (b"# coding: no-such\n", "syntax error in s.py: ", None),
        (b"(" * 500 + b")" * 500, "s", None),
    ],
)
def test_other_files_are_not_python(tmp_path: Path, content: bytes, message: str, hint: str | None):
    path = tmp_path / "s.py"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refusal:
        parse_file(str(path), "s.py")
    assert refusal.value.message.startswith(message)
    assert hint is None or refusal.value.hint == hint
    assert "\n" not in refusal.value.message + (refusal.value.hint or "")


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbfx = 1\n", b"# coding: latin-1\nx = '\xff'\n", b"x = 1\r\ny = 2\r\n"]
)
def test_python_sources_are_parsed(tmp_path: Path, content: bytes):
    path = tmp_path / "s.py"
    path.write_bytes(content)
    parse_file(str(path))


def test_warnings_are_left_to_the_ranks(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    parse_file(str(write_program(tmp_path, "s.py", "x = '\\d'\nassert (x, 'always true')\n")))
    assert not recwarn.list


def test_a_program_is_distinguished_from_a_script(tmp_path: Path):
    program = tmp_path / "prog"
    program.write_bytes(b"\x7fELF\0\0")
    program.chmod(0o755)
    with pytest.raises(UsageError) as refusal:
        parse_file(str(program), "prog")
    assert refusal.value.hint == "for a program that is not Python: ddplaunch run --no-python ./prog"


def test_find_module_runs_nothing(tmp_path: Path):
    for name in ("top.py", "pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/deep.py", "pkg/__main__.py"):
        write_program(tmp_path, name, BOOM)
    write_program(tmp_path, "space/inner/leaf.py", BOOM)
    write_program(tmp_path, "half/sub/__init__.py", BOOM)

    def origin(name: str) -> str | None:
        spec = find_module(name, str(tmp_path))
        return spec and spec.origin and str(Path(spec.origin).relative_to(tmp_path))

    assert origin("top") == "top.py"
    assert origin("pkg") == "pkg/__init__.py"
    assert origin("pkg.sub.deep") == "pkg/sub/deep.py"
    assert origin("pkg.__main__") == "pkg/__main__.py"
    assert origin("space.inner.leaf") == "space/inner/leaf.py"
    assert origin("half.sub") == "half/sub/__init__.py"
    for name in ("no", "top.sub", "pkg.no", "pkg.sub.no.deep", "space.no", "space.inner.no"):
        assert find_module(name, str(tmp_path)) is None, name
    namespace = find_module("space.inner", str(tmp_path))
    assert namespace is not None
    assert list(namespace.submodule_search_locations or ()) == [str(tmp_path / "space/inner")]


def test_find_module_as_import_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, later = tmp_path / "first", tmp_path / "later"
    write_program(first, "shadow.py", BOOM)
    write_program(later, "shadow/__init__.py", BOOM)
    (first / "mixed").mkdir()  # a folder without __init__.py loses against a package anywhere
    write_program(later, "mixed/__init__.py", BOOM)
    write_program(later, "away.py", BOOM)
    monkeypatch.syspath_prepend(str(later))
    found = {name: find_module(name, str(first)) for name in ("shadow", "mixed", "away", "json.tool", "sys", "this")}
    assert found["shadow"].origin == str(first / "shadow.py")
    assert found["mixed"].origin == str(later / "mixed/__init__.py")
    assert found["away"].origin == str(later / "away.py")
    assert found["json.tool"].origin.endswith("json/tool.py")
    assert found["sys"].origin == "built-in"
    assert found["this"] is not None
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "statement",
    [
        "import leaf",
        "import os, leaf",
        "import os as o, leaf as l",
        "import leaf; x = 1",
        "x = 1; import leaf",
        "if x: import leaf",
        "\timport  leaf",
        "import os, \\\n    leaf",
        "import leaf  # the leaf",
        "from leaf import x",
        "from leaf import (x,\n    y)",
        "from leaf import *",
        "from . import leaf",
        "from .import leaf",
        "from .leaf import x",
        "from.leaf import x",
        "from . import (  # (comment),\n    other,  # and\n    leaf as l,\n)",
        "from . import(leaf)",
        "import leaf\r",
    ],
)
def test_what_looks_like_an_import_statement(tmp_path: Path, statement: str):
    write_program(tmp_path, "leaf.py", "'the leaf'\n")
    (tmp_path / "train.py").write_text(f"{statement}\n")
    assert "'the leaf'\n" in local_sources(str(tmp_path / "train.py"), str(tmp_path))


@pytest.mark.parametrize("line", ["# import leaf", "x.leaf", "important leaf", "from leaf importing", "import leafy"])
def test_other_lines_are_not_imports(tmp_path: Path, line: str):
    write_program(tmp_path, "leaf.py", "'the leaf'\n")
    write_program(tmp_path, "train.py", f"{line}\n")
    assert len(list(local_sources(str(tmp_path / "train.py"), str(tmp_path)))) == 1


def test_local_sources_follow_every_import_statement(tmp_path: Path):
    write_program(
        tmp_path,
        "train.py",
        """
        import os, plain
        import pkg.dotted as d
        def main():
            from lazy import thing
            try:
                import caught
            except ImportError:
                pass
        from pkg import attribute, module
        if False:
            import never
        """,
    )
    names = ["plain", "lazy", "caught", "never", "stranger", "pkg/dotted", "pkg/module", "pkg/other/sibling"]
    for name in names:
        write_program(tmp_path, f"{name}.py", f"{name!r}\n")
    write_program(tmp_path, "pkg/__init__.py", "'pkg'\nfrom . import relative\n")
    write_program(tmp_path, "pkg/relative.py", "'relative'\nfrom .other.user import x\n")
    write_program(tmp_path, "pkg/other/__init__.py", "'other'\n")
    write_program(
        tmp_path, "pkg/other/user.py", "'user'\nfrom .sibling import y\nfrom ..up import z\nfrom .. import also\n"
    )
    write_program(tmp_path, "pkg/up.py", "'up'\nimport train\n")
    write_program(tmp_path, "pkg/also.py", "'also'\n")
    texts = list(local_sources(str(tmp_path / "train.py"), str(tmp_path)))
    firsts = [text.partition("\n")[0].strip("'") for text in texts]
    assert len(firsts) == len(set(firsts)), "a file is read once"
    assert set(firsts[1:]) == {
        *("plain", "lazy", "caught", "never", "pkg/dotted", "pkg/module"),
        *("pkg", "relative", "other", "user", "pkg/other/sibling", "up", "also"),
    }


def test_local_sources_pass_over_what_cannot_be_read(tmp_path: Path):
    write_program(tmp_path, "train.py", "import broken, folder, bytes, good\n")
    write_program(tmp_path, "broken.py", "x = (\n")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "bytes.py").write_bytes(b"\0\xff")
    write_program(tmp_path, "good.py", "'good'\n")
    assert "'good'\n" in local_sources(str(tmp_path / "train.py"), str(tmp_path))


def test_the_options_that_a_file_names():
    """A file names options in quotes, as annotated fields and as parameters; other text and imports do not count."""
    names = find_option_names(
        ast.parse(
            """
            '''torchrun --nproc 4 train.py'''
            import options
            # --comment
            parser.add_argument('-l', "--log-dir", help='see --gpus')
            click.option("--json/--no-json")
            @dataclass
            class Arguments:
                dry_run: bool = False
                plain = 1
            master_addr = "x"
            def main(nnodes=1, *, node_rank: int): pass
            """.replace("\n            ", "\n")
        )
    )
    assert names == {"-l", "--log-dir", "--json", "--no-json", "--dry-run", "--nnodes", "--node-rank"}
