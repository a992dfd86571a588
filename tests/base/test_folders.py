"""Tests of the folders that ddplaunch creates for itself."""

import errno
import os
import resource

import pytest
from msgspec import Struct

from ddplaunch.base.safe_files import make_private_dir
from ddplaunch.system import record_folder
from ddplaunch.system.history_dir import history_dir, open_history_dir
from ddplaunch.system.record_folder import RecordFolder


def test_a_relative_folder_for_temporary_files_holds_after_chdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", ".")
    made = make_private_dir("job") or ""
    assert os.path.dirname(made) == str(tmp_path)
    assert os.path.isabs(made)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    other = make_private_dir("job") or ""
    assert os.path.dirname(other) == "/tmp"
    os.rmdir(other)


def test_no_history_in_the_current_folder(tmp_path, monkeypatch):
    """HOME may be relative; expanduser leaves "~" for a user who has none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")
    (tmp_path / "~").mkdir()
    assert history_dir() is None


def test_history_on_a_read_only_disk_can_be_read(tmp_path, monkeypatch):
    def fchmod(fd, mode):
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "ddplaunch" / "runs").mkdir(parents=True, mode=0o755)
    monkeypatch.setattr(os, "fchmod", fchmod)
    folder = open_history_dir(str(tmp_path / "ddplaunch" / "runs"), create=False)
    assert os.listdir(folder) == []
    os.close(folder)


def test_history_of_another_user_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="belongs to another user"):
        open_history_dir(str(tmp_path / "runs"), create=True)


class Job(Struct):
    target: str
    cwd: str


def test_a_record_of_a_job_in_a_folder_whose_name_is_not_utf_8(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = RecordFolder("jobs", Job, lambda job: "7.json", lambda job: 0.0)
    folder.save(Job("train.py", "/home/ä/\udcff"))
    assert folder.list() == [Job("train.py", "/home/ä/?")]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        assert not folder.save(Job("train.py", 100 * "x")), "as on a full disk"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path / "ddplaunch" / "jobs") == ["7.json"]


def test_the_oldest_records_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(record_folder, "MAX_RECORDS", 3)
    folder = RecordFolder("jobs", Job, lambda job: f"{job.target}.json", lambda job: float(job.target))
    for number in (5, 1, 4, 2, 3):
        assert folder.save(Job(str(number), "/"))
    assert [job.target for job in folder.list()] == ["5", "4", "3"]
