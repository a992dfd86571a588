"""The trial beside a run: when there is one, how it is run, and that it ends with the run."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.preload.question import Question
from tests.conftest import alive, clean_environment, command, wait_until, write
from tests.patience import patience
from tests.preload import verdicts

STAND_IN = """
    import json, os, subprocess, sys
    pids = [os.getpid()]
    if os.path.exists("endless"):
        pids.append(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
    with open(sys.argv[1]) as question:
        told = {"question": json.load(question), "verdict": sys.argv[2], "pids": pids}
    told["path"] = [entry for entry in sys.path if entry in ("", os.getcwd())]
    told["nice"] = os.nice(0)
    with open("/proc/self/environ") as environ:
        told["environ"] = dict(each.split("=", 1) for each in environ.read().split("\\0") if each)
    with open("told.new", "w") as file:
        json.dump(told, file)
    os.rename("told.new", "told")
    if len(pids) > 1:
        import time
        time.sleep(1000)
    os.rename("told", "tried")
"""
"""In the place of the real one: it tells how it was run."""

SITE = """
    import sys
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "ddplaunch.preload.trial":
                from importlib.util import spec_from_file_location
                return spec_from_file_location(name, {path!r})
    sys.meta_path.insert(0, Finder())
"""

PROGRAM = """
    import os, sys, time
    import torch
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
"""

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start a job whose ranks end once the file is there that their argument names."""
    site = verdicts.installed(tmp_path, late="import later", later="")
    write(site, "sitecustomize.py", SITE.format(path=str(write(tmp_path, "stand_in.py", STAND_IN))))
    write(tmp_path, "train.py", PROGRAM)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(site)}
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command("run", *words),
            cwd=tmp_path,
            env=clean_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for each in started:
        each.kill()
        each.communicate()


def end_well(job: subprocess.Popen[str]) -> str:
    out, err = job.communicate(timeout=patience(60))
    assert (job.returncode, err) == (0, ""), err
    return out


def keep(folder: Path, asked: Question, modules: Sequence[str], **more: Any) -> Path:
    """Have a verdict in the cache, as a trial leaves it."""
    site = folder / "lib" / "site-packages"
    return verdicts.keep(folder / "cache", asked, modules, names=(), pythonpath=site, **more)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache" / "ddplaunch" / "preload").iterdir())


def test_it_is_asked_while_the_ranks_run(run: Run, tmp_path: Path):
    end_well(run("--nproc", "2", "train.py", "tried"))
    told = json.loads((tmp_path / "tried").read_text())
    torch = {"module": "torch", "names": []}
    no = {"sets_unseen": False, "seeds_first": False}
    assert told["question"] == {"statements": [torch], "settings": [], **no, "late": []}
    assert Path(told["verdict"]).parent == tmp_path / "cache" / "ddplaunch" / "preload"
    assert told["nice"] == 19
    assert told["path"] == []
    assert not {"RANK", "DDPLAUNCH_TOKEN"} & told["environ"].keys()
    assert kept(tmp_path) == []


@pytest.mark.parametrize("end", ["done", "Ctrl-C", "killed"])
def test_it_ends_with_the_run(run: Run, tmp_path: Path, end: str):
    (tmp_path / "endless").touch()
    job = run("--nproc", "2", "train.py", "done")
    wait_until((tmp_path / "told").exists, "the trial")
    pids = json.loads((tmp_path / "told").read_text())["pids"]
    assert all(map(alive, pids))
    if end == "done":
        (tmp_path / "done").touch()
        end_well(job)
        assert not any(map(alive, pids))
        assert kept(tmp_path) == []
    else:
        job.send_signal({"Ctrl-C": signal.SIGINT, "killed": signal.SIGKILL}[end])
        job.wait(patience(60))
        wait_until(lambda: not any(map(alive, pids)), "its end")


@pytest.mark.parametrize(
    "words",
    [
        ("--nproc", "2", "--preload", "torch", "train.py"),
        ("--nproc", "2", "--preload", "none", "train.py"),
        ("--nproc", "2", "--start", "exec", "train.py"),
        ("--nproc", "2", "--no-python", "/bin/test", "-e"),
    ],
)
def test_where_none_is_wanted(run: Run, tmp_path: Path, words: tuple[str, ...]):
    (tmp_path / "done").touch()
    end_well(run(*words, "done"))
    assert not (tmp_path / "cache").exists()


def test_nor_with_a_verdict_that_has_tried_all(run: Run, tmp_path: Path):
    (tmp_path / "done").touch()
    keep(tmp_path, verdicts.question(tmp_path / "train.py"), ["torch"])
    before = kept(tmp_path)
    end_well(run("--nproc", "2", "train.py", "done"))
    assert kept(tmp_path) == before
    assert not list(tmp_path.glob("t*ed"))


def test_what_a_run_imports_late_is_tried_in_the_next(run: Run, tmp_path: Path):
    """Once: then it has been, whatever came of it."""
    write(tmp_path, "train.py", PROGRAM + "    import own\n    exec('import late')\n")
    write(tmp_path, "own.py", "")
    asked = verdicts.question(tmp_path / "train.py")
    verdict = keep(tmp_path, asked, ["torch"])
    (tmp_path / "done").touch()
    end_well(run("--nproc", "2", "train.py", "done"))
    (late,) = (path for path in verdict.parent.iterdir() if path.suffix == ".late")
    assert late.read_text().split() == ["later", "late"]
    end_well(run("--nproc", "2", "train.py", "tried"))
    assert json.loads((tmp_path / "tried").read_text())["question"]["late"] == ["later", "late"]
    (tmp_path / "tried").unlink()
    keep(tmp_path, asked, ["torch", "late"], tried=["later", "late"])
    end_well(run("--nproc", "2", "train.py", "done"))
    assert not (tmp_path / "tried").exists()
    (tmp_path / "lib" / "site-packages" / "other.py").touch()
    write(tmp_path, "own.py", "def main(): import other\nmain()\n")
    end_well(run("--nproc", "2", "train.py", "done"))
    assert late.read_text().split() == ["later", "late", "other"]


def test_a_job_that_fails_tells_nothing(run: Run, tmp_path: Path):
    write(tmp_path, "train.py", "import torch\ndef main():\n    import late\n    1 / 0\nmain()\n")
    verdict = keep(tmp_path, verdicts.question(tmp_path / "train.py"), ["torch"])
    job = run("--nproc", "2", "train.py")
    job.communicate(timeout=patience(60))
    assert job.returncode == 1
    assert kept(tmp_path) == [verdict.name]


def test_a_cache_that_cannot_be_written_harms_nobody(run: Run, tmp_path: Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "ddplaunch").touch()
    (tmp_path / "done").touch()
    end_well(run("--nproc", "2", "train.py", "done"))
    assert not (tmp_path / "told").exists()
