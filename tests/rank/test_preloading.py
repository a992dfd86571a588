"""What a verdict allows is imported once; where that fails torch alone is, and the verdict is gone."""

from __future__ import annotations

import json

import pytest

from tests.conftest import write
from tests.preload import verdicts

PROGRAM = """
    import sys
    at_start = "torch" in sys.modules, "heavy" in sys.modules
    import torch
    import heavy
    with open("/proc/self/cmdline") as file:
        print(*at_start, file.read().startswith("python train.py"))
"""

IN_A_ZYGOTE = "import sys\nif 'zygote.py' in sys.orig_argv[1]:\n    "


@pytest.fixture
def run(launch, tmp_path):
    """Run two ranks with a verdict that has ``heavy``; return what was printed, the event "ready", and the verdict."""

    def run(source: str):
        site = verdicts.installed(tmp_path, heavy=source)
        script = write(tmp_path, "train.py", PROGRAM)
        verdict = verdicts.keep(
            tmp_path / "cache", verdicts.question(script), ["torch", "heavy"], names=(), pythonpath=site
        )
        environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(site)}
        done = launch("run", "--nproc", "2", "--log-dir", "logs", "--run-id", "x", "train.py", env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stderr.splitlines()[:-1] == []  # nothing is said but where the log folder is
        events = map(json.loads, (tmp_path / "logs" / "x" / "events.jsonl").read_text().splitlines())
        ready = next(event for event in events if event["event"] == "ready")
        return {line[4:] for line in done.stdout.splitlines()}, ready, verdict

    return run


def test_it_is_imported_once(run, tmp_path):
    printed, ready, verdict = run("import os; open(f'by-{os.getpid()}', 'w').close()")
    assert printed == {"True True True"}
    assert len(list(tmp_path.glob("by-*"))) == 1
    assert (ready["modules"], ready["because"], ready["verdict"]) == (["torch", "heavy"], None, str(verdict))


@pytest.mark.parametrize(
    ("trouble", "because"),
    [
        ("raise ImportError('no libheavy.so')", "importing heavy failed"),
        ("raise ModuleNotFoundError('no light')", "importing heavy failed"),
        ("sys.exit(3)", "importing heavy failed"),
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "2 threads run after importing torch, heavy",
        ),
    ],
)
def test_what_was_not_so_is_tried_anew(run, trouble, because):
    printed, ready, verdict = run(IN_A_ZYGOTE + trouble)
    assert printed == {"True False True"}
    assert (ready["forks"], ready["modules"], ready["because"]) == (True, ["torch"], because)
    assert (ready["excluded"], ready["verdict"]) == ([], None)
    assert not verdict.exists()


def test_a_verdict_that_hides_a_file_of_the_users(launch, tmp_path):
    """Which it did not know of: the zygote has the last word."""
    site = verdicts.installed(tmp_path, heavy="import json.tool as _, other", other="where = 'installed'")
    write(tmp_path, "other.py", "where = 'mine'")
    script = write(tmp_path, "train.py", "import heavy, torch, other; print(other.where)")
    verdicts.keep(tmp_path / "cache", verdicts.question(script), ["torch", "heavy"], names=(), pythonpath=site)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(site)}
    done = launch("run", "--nproc", "2", "train.py", env=environment)
    assert (sorted(done.stdout.splitlines()), done.stderr) == (["[0] mine", "[1] mine"], "")
