"""Tests of parsing a target, without running it."""

from __future__ import annotations

import os
import py_compile
import zipfile
from pathlib import Path

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.target.target import Target, TargetKind, find_target
from tests.conftest import write_program

BOOM = "raise SystemExit('this must not run')\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_program(tmp_path, "train.py", BOOM + "def main(rank, lr=0.1): pass\ndef evaluate(): pass\n")
    write_program(tmp_path, "sub/other.py", BOOM + "def main(): pass\n")
    write_program(tmp_path, "pkg/__init__.py", BOOM)
    write_program(tmp_path, "pkg/__main__.py", BOOM)
    write_program(tmp_path, "pkg/mod.py", BOOM + "def run(rank): pass\n")
    write_program(tmp_path, "bare/__init__.py", "")
    write_program(tmp_path, "space/leaf.py", BOOM + "def run(rank): pass\n")
    write_program(tmp_path, "odd:name.py", BOOM)
    write_program(tmp_path, "no-module.py", "def main(): pass\n")
    write_program(tmp_path, "broken.py", "x = (\n")
    write_program(tmp_path, "broken_pkg/__init__.py", "")
    write_program(tmp_path, "broken_pkg/mod.py", "x = (\n")
    write_program(tmp_path, "prog", "#!/bin/sh\n").chmod(0o755)
    write_program(tmp_path, "data.txt", "")
    (tmp_path / "folder").mkdir()
    (tmp_path / "app").mkdir()
    write_program(tmp_path, "app/train.py", "")
    write_program(tmp_path, "main/__main__.py", BOOM)
    (tmp_path / "compiled").mkdir()
    py_compile.compile(str(tmp_path / "train.py"), str(tmp_path / "compiled" / "__main__.pyc"))
    for name, inside in (("app.pyz", "__main__.py"), ("other.zip", "train.py")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(inside, BOOM)
    write_program(tmp_path, "other.pyc", "of another Python")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "linked.py").symlink_to(tmp_path / "sub" / "other.py")
    os.mkfifo(tmp_path / "pipe.py")
    return tmp_path


def look(project: Path, typed: str, *, m: bool = False, no_python: bool = False) -> Target:
    return find_target(typed, ("-x",), as_module=m, as_program=no_python, cwd=str(project))


@pytest.mark.parametrize(
    ("typed", "flags", "kind", "first", "source", "argv"),
    [
        ("train.py", {}, TargetKind.SCRIPT, "", "train.py", "python train.py -x"),
        ("sub/other.py", {}, TargetKind.SCRIPT, "sub", "sub/other.py", "python sub/other.py -x"),
        ("linked.py", {}, TargetKind.SCRIPT, "sub", "linked.py", "python linked.py -x"),
        ("odd:name.py", {}, TargetKind.SCRIPT, "", "odd:name.py", "python odd:name.py -x"),
        ("train.py:main", {}, TargetKind.FUNCTION, "", "train.py", "python train.py:main -x"),
        ("sub/other.py:main", {}, TargetKind.FUNCTION, "sub", "sub/other.py", "python sub/other.py:main -x"),
        ("main", {}, TargetKind.MAIN, "main", "main/__main__.py", "python main -x"),
        ("app.pyz", {}, TargetKind.MAIN, "app.pyz", None, "python app.pyz -x"),
        ("compiled", {}, TargetKind.MAIN, "compiled", None, "python compiled -x"),
        ("compiled/__main__.pyc", {}, TargetKind.SCRIPT, "compiled", None, "python compiled/__main__.pyc -x"),
        ("no-module.py:main", {}, TargetKind.FUNCTION, "", "no-module.py", "python no-module.py:main -x"),
        ("pkg.mod:run", {}, TargetKind.FUNCTION, "", "pkg/mod.py", "python pkg.mod:run -x"),
        ("space.leaf:run", {}, TargetKind.FUNCTION, "", "space/leaf.py", "python space.leaf:run -x"),
        ("pkg.mod", {"m": True}, TargetKind.MODULE, "", "pkg/mod.py", "python -m pkg.mod -x"),
        ("pkg", {"m": True}, TargetKind.MODULE, "", "pkg/__main__.py", "python -m pkg -x"),
        ("space.leaf", {"m": True}, TargetKind.MODULE, "", "space/leaf.py", "python -m space.leaf -x"),
        ("./prog", {"no_python": True}, TargetKind.PROGRAM, None, None, "./prog -x"),
        ("sh", {"no_python": True}, TargetKind.PROGRAM, None, None, "sh -x"),
    ],
)
def test_targets(project, typed, flags, kind, first, source, argv):
    found = look(project, typed, **flags)
    assert found.kind is kind
    assert found.args == ("-x",)
    assert found.sys_path_0 == (None if first is None else str(project / first).rstrip("/"))
    assert found.source == (source and str(project / source))
    assert " ".join(found.argv) == argv


def test_functions_have_their_signature(project):
    assert str(look(project, "train.py:main").signature) == "main(rank, lr=0.1)"
    assert str(look(project, "pkg.mod:run").signature) == "run(rank)"


@pytest.mark.parametrize(
    ("typed", "flags", "message", "hint"),
    [
        ("", {}, "the target is empty", "train.py"),
        ("trian.py", {}, "no such script: trian.py", "did you mean train.py?"),
        ("train", {}, "no such script: train", "did you mean train.py?"),
        ("sub/othr.py", {}, "no such script: sub/othr.py", "did you mean sub/other.py?"),
        ("no/train.py", {}, "no such script: no/train.py", "the folder no does not exist"),
        ("pkg.mod", {}, "no such script: pkg.mod", "it is a module: ddplaunch run -m pkg.mod"),
        ("train.py/x.py", {}, "no such script: train.py/x.py", "the folder train.py does not exist"),
        ("x" * 300, {}, f"cannot read {'x' * 300}: File name too long", ""),
        ("folder", {}, "folder is a folder, not a script", "name the script in it"),
        ("app", {}, "app is a folder", "ddplaunch run app/train.py"),
        ("other.zip", {}, "other.zip is an archive without a __main__.py", "python -m zipapp"),
        ("other.pyc", {}, "other.pyc was not compiled by this Python 3.", "compile it again"),
        ("dangling.py", {}, "dangling.py is a link to {project}/nowhere.py, which", ""),
        ("pipe.py", {}, "pipe.py is not a regular file", ""),
        ("broken.py", {}, "syntax error in broken.py, line 1", "x = ("),
        ("broken_pkg.mod", {"m": True}, "syntax error in broken_pkg/mod.py, line 1", "x = ("),
        ("train.py:mian", {}, "train.py has no function mian", "did you mean train.py:main?"),
        ("train.py:", {}, "'' is not a function name", "train.py:main"),
        ("pgk:run", {}, "no module named pgk in", "did you mean pkg?"),
        ("pkg.mdo:run", {}, "no module named pkg.mdo in", "did you mean pkg.mod?"),
        ("pgk.mod:run", {}, "no module named pgk.mod in", "there is no module pgk"),
        ("pkg.mod:rnu", {}, "pkg.mod has no function rnu", "did you mean pkg.mod:run?"),
        ("train.py", {"m": True}, "-m takes a module, and train.py is a file", "leave -m out: ddplaunch run train.py"),
        ("sub/other.py", {"m": True}, "-m takes a module", "leave -m out"),
        ("sub/no.py", {"m": True}, "sub/no.py is not a module name", "package.module"),
        (
            "pkg.mod:run",
            {"m": True},
            "-m takes a module, and pkg.mod:run names a function",
            "ddplaunch run pkg.mod:run",
        ),
        ("pkg.mdo", {"m": True}, "no module named pkg.mdo in", "did you mean pkg.mod?"),
        ("bare", {"m": True}, "bare is a package without a __main__ module", "name a module"),
        (".mod", {"m": True}, ".mod is not a module", "package.module"),
        ("./porg", {"no_python": True}, "no such program: ./porg", "did you mean ./prog?"),
        ("./data.txt", {"no_python": True}, "./data.txt is not executable", "chmod +x ./data.txt"),
        ("./folder", {"no_python": True}, "./folder is a folder, not a program", ""),
        ("prog", {"no_python": True}, "no program named prog on PATH", "did you mean ./prog?"),
        ("train.py", {"m": True, "no_python": True}, "-m and --no-python contradict each other", "one of them"),
    ],
)
def test_targets_that_cannot_run_are_refused(project, typed, flags, message, hint):
    with pytest.raises(UsageError) as refusal:
        look(project, typed, **flags)
    assert refusal.value.message.startswith(message.replace("{project}", str(project)))
    assert hint in (refusal.value.hint or "")
    assert (refusal.value.hint is not None) >= bool(hint)


@pytest.mark.parametrize(
    ("typed", "option", "named"),
    [
        ("options.py", "--log-dir", True),
        ("options.py", "--log", False),
        ("options.py:main", "--log-dir", False),
        ("options.py:main", "--batch-size", True),
        ("options.py:main", "--rank", False),
        ("options.py:bare", "--log-dir", True),
        ("options.py:bare", "--batch-size", True),
        ("options.py:anything", "--log-dir", True),
    ],
)
def test_options_of_the_programs_own(tmp_path, typed, option, named):
    write_program(
        tmp_path,
        "options.py",
        """
        parser.add_argument("--log-dir")
        def main(rank, batch_size): pass
        def bare(): pass
        @decorated
        def anything(): pass
        """,
    )
    assert look(tmp_path, typed).has_option(option) is named
