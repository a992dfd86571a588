"""Tests of packing a folder, and of its copies on a disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.features.code import copies
from ddplaunch.features.code.archive import CodeArchive, pack_folder
from tests.conftest import assert_refused
from tests.features.code.project import git, make_project

SMALL = {"train.py": "print('one')\n", "pkg/__init__.py": "", "pkg/model.py": "x = 1\n"}


def copy(archive: CodeArchive, parent: Path) -> Path:
    return Path(copies.make_copy(str(parent), archive.version.sha, archive.version.name, archive.data))


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_a_small_project_has_one_name_whoever_packs_it(tmp_path: Path):
    project = make_project(tmp_path / "project", SMALL, ignored="data\n")
    (project / "data").mkdir()
    (project / "data/big.bin").write_bytes(bytes(1000))
    (project / "new.py").write_text("not committed yet")
    (project / "train.py").chmod(0o755)
    archive = pack_folder(str(project))
    assert archive.files == {*SMALL, ".gitignore", "new.py"}
    assert archive.version.commit == git(project, "rev-parse", "HEAD").strip()
    assert not archive.version.clean
    place = copy(archive, tmp_path / "copies")
    assert listed(place) == sorted(archive.files)
    assert os.access(place / "train.py", os.X_OK)
    assert not os.access(place / "new.py", os.X_OK)

    (project / "new.py").unlink()
    (project / "train.py").chmod(0o644)
    again = pack_folder(str(project))
    assert again.version.clean
    twin = make_project(tmp_path / "twin", SMALL, ignored="data\n")
    assert pack_folder(str(twin)).version.sha == again.version.sha != archive.version.sha
    assert str(again).startswith("4 files, 24 B (")
    assert str(again).endswith(f"{again.version.name} of {project}, commit {again.version.commit[:12]}")


@pytest.mark.parametrize("size", [2 << 20, 9 << 20])
def test_megabytes(tmp_path: Path, size: int):
    noise = os.urandom(size)
    archive = pack_folder(str(make_project(tmp_path / "project", {"weights.bin": noise, "train.py": ""})))
    assert archive.size >= size
    assert (copy(archive, tmp_path / "copies") / "weights.bin").read_bytes() == noise


def test_sixty_megabytes_are_refused_before_anything_is_read(tmp_path: Path, run_in_fork):
    project = make_project(tmp_path / "project", {"train.py": ""})
    with (project / "data.bin").open("wb") as file:
        file.truncate(60 << 20)
    refused = run_in_fork("run", "--hosts", "n1", "--code", ".", "train.py", cwd=project)
    assert_refused(
        refused,
        "--code .: 3 files have 60 MiB, at most 50 MiB are copied; the largest: data.bin 60 MiB,",
        "list data in .gitignore",
    )


def test_a_link_out_of_the_folder_stays_a_link(tmp_path: Path):
    (tmp_path / "elsewhere").write_text("not to be copied")
    project = make_project(tmp_path / "project", SMALL)
    (project / "data").symlink_to("../elsewhere")
    (project / "pkg/alias.py").symlink_to("model.py")
    archive = pack_folder(str(project))
    assert archive.notes == ("copied as links, which lead out of the folder: data",)
    place = copy(archive, tmp_path / "copies")
    assert os.readlink(place / "data") == "../elsewhere"
    assert (place / "pkg/alias.py").read_text() == "x = 1\n"


def test_secrets_are_never_copied_though_git_tracks_them(tmp_path: Path):
    secrets = {".env": "TOKEN=geheim", "deploy": "-----BEGIN RSA PRIVATE KEY-----\ngeheim"}
    archive = pack_folder(str(make_project(tmp_path / "project", {**SMALL, **secrets})))
    assert archive.notes == ("secrets are never copied: .env, deploy",)
    place = copy(archive, tmp_path / "copies")
    assert set(listed(place)) == {*SMALL, ".gitignore"} == archive.files


@pytest.mark.parametrize("times", [1, 1000])
def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch, times: int):
    """It is read again, so that the copy has it in one state; one that changes all the time is refused."""
    project = make_project(tmp_path / "project", {**SMALL, "log.txt": "line\n"})
    log, look, left = project / "log.txt", os.fstat, [times]

    def write_after_look(fd: int) -> os.stat_result:
        info = look(fd)
        if info.st_ino == log.stat().st_ino and left[0]:
            left[0] -= 1
            with log.open("a") as file:
                file.write("line\n")
        return info

    monkeypatch.setattr(os, "fstat", write_after_look)
    if times == 1000:
        with pytest.raises(UsageError, match=r"log\.txt changes while it is read"):
            pack_folder(str(project))
    else:
        archive = pack_folder(str(project))
        monkeypatch.undo()
        assert (copy(archive, tmp_path / "copies") / "log.txt").read_text() == "line\n" * 2


def test_without_git_hidden_files_are_left_out(tmp_path: Path):
    for name in ("train.py", ".hidden", ".venv/lib.py", "pkg/a.py", "pkg/__pycache__/a.pyc"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "link").symlink_to("pkg")
    archive = pack_folder(str(tmp_path))
    assert archive.files == {"train.py", "pkg/a.py", "link"}
    assert archive.version.commit is None


def test_a_repository_within_the_repository(tmp_path: Path):
    project = make_project(tmp_path / "project", SMALL, ignored="*.log\n")
    make_project(project / "vendor/lib", {"lib.py": "", "a.log": ""}, ignored="*.o\n")
    (project / "vendor/lib/b.o").touch()
    assert {"vendor/lib/lib.py", "vendor/lib/a.log"} < pack_folder(str(project)).files
    assert "vendor/lib/b.o" not in pack_folder(str(project)).files


def test_a_target_that_would_not_run_from_the_copy(tmp_path: Path, run_in_fork):
    project = make_project(tmp_path / "project", SMALL, ignored="scratch.py\n")
    (project / "scratch.py").touch()

    def refuse(*words):
        return run_in_fork("run", "--hosts", "n1", *words, cwd=project)

    assert_refused(refuse("--code", ".", "scratch.py"), "--code copies no scratch.py: git ignores it", "git add -f")
    assert_refused(refuse("--code", ".", f"{project}/train.py"), "absolute path", "type train.py")
    assert_refused(refuse("--code", "pkg", "train.py"), f"the current folder {project} is not in it", "--code .")
    assert_refused(refuse("--code", "none", "train.py"), "--code none: no such folder")
    assert_refused(refuse("--code", ".", "--log-dir", "logs", "train.py"), "--log-dir logs does not work with --code")
    here = run_in_fork("run", "--code", ".", "train.py", cwd=project)
    assert_refused(here, "--code . copies nothing: the job runs on this machine", "--hosts")


def test_a_copy_is_used_again_until_its_code_is_changed(tmp_path: Path):
    archive = pack_folder(str(make_project(tmp_path / "project", SMALL)))
    parent, name = str(tmp_path / "copies"), archive.version.name
    first = copy(archive, tmp_path / "copies")
    (first / "pkg/__pycache__").mkdir()
    (first / "pkg/__pycache__/model.pyc").touch()
    assert copies.find_copy(parent, name) == str(first)
    assert copies.written_files(str(first)) == []

    (first / "last.pt").touch()
    assert copies.find_copy(parent, name) == str(first) == str(copy(archive, tmp_path / "copies"))
    assert copies.remove_copy(str(first)) == ["last.pt"]

    (first / "train.py").write_text("print('two')\n")
    assert copies.find_copy(parent, name) is None
    second = copy(archive, tmp_path / "copies")
    assert second.name == f"{name}.2"
    assert (second / "train.py").read_text() == SMALL["train.py"]
    assert copies.find_copy(parent, name) == str(second)

    assert copies.remove_copy(str(second)) == []
    assert sorted(os.listdir(parent)) == [name, f"{name}.files"]
    assert copies.remove_copy(str(first)) == ["last.pt", "train.py"]


def test_a_cache_forgets_what_nobody_uses(tmp_path: Path):
    parent = tmp_path / "copies"
    archives = {}
    for name in ("old", "held", "written", "new"):
        archives[name] = pack_folder(str(make_project(tmp_path / name, {"train.py": name})))
        place = copy(archives[name], parent)
        if name != "new":
            os.utime(f"{place}.files", (0, 0))
        if name == "written":
            (place / "last.pt").touch()
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(parent / archives["held"].version.name)], stdin=-1, stdout=-1
    )
    try:
        assert holder.stdout
        holder.stdout.readline()
        copies.remove_unused(str(parent))
    finally:
        holder.communicate()
    left = {name for name in archives if (parent / archives[name].version.name).exists()}
    assert left == {"held", "written", "new"}


_HOLDS = """
import sys
from ddplaunch.features.code.copies import hold_copy
hold_copy(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""
