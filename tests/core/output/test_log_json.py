"""Tests of ``--log-json``: one JSON object per message of ddplaunch, and unchanged lines of ranks."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from ddplaunch.core.output.log_message import MessageKind
from ddplaunch.observe.stacks_text import STACKS
from tests.conftest import clean_environment, ddplaunch_command, free_port, write_program
from tests.reference.page import read_lists
from tests.start_modes import LIGHT

MESSAGE_FIELDS, MESSAGE_KINDS = read_lists("## What --log-json writes")
LOG_JSON = ("run", "--log-json", *LIGHT)
PRINTS = """
    import os
    import sys

    print("hello from", os.environ["RANK"])
    print('{"source": "me"}', file=sys.stderr)
"""
FAILS = f"""
    {PRINTS.strip()}
    if os.environ["RANK"] == "1":
        raise ValueError("no labels\\x1b[31m")
"""


def messages(text: str) -> list[dict[str, Any]]:
    """The messages of ddplaunch in it; every other line is a rank's."""
    lines = [line for line in text.splitlines() if not line.startswith("[")]
    assert all(line.startswith('{"source": "ddplaunch", ') for line in lines), text
    found = [json.loads(line) for line in lines]
    for each in found:
        assert list(each)[: len(MESSAGE_FIELDS)] == list(MESSAGE_FIELDS)
        assert each["kind"] in MESSAGE_KINDS
    return found


def kinds(text: str) -> list[str]:
    return [each["kind"] for each in messages(text)]


def test_the_page_has_every_kind():
    kinds = (*vars(MessageKind).values(), STACKS)
    assert {kind.name for kind in kinds if isinstance(kind, MessageKind)} == set(MESSAGE_KINDS)


def test_a_job_that_ends_well(run_ddplaunch, tmp_path):
    done = run_ddplaunch(*LOG_JSON, "--run-id", "a", "--nproc", "2", write_program(tmp_path, "train.py", PRINTS))
    assert sorted(done.stdout.splitlines()) == ["[0] hello from 0", "[1] hello from 1"]
    (end,) = messages(done.stderr)
    assert (end["kind"], end["level"], end["run_id"], end["node_rank"], end["code"]) == ("end", "info", "a", 0, 0)
    assert '[0] {"source": "me"}' in done.stderr.splitlines()


def test_a_failure_with_its_restart_has_the_verdict(run_ddplaunch, tmp_path):
    script = write_program(tmp_path, "train.py", FAILS)
    done = run_ddplaunch(*LOG_JSON, "--nproc", "2", "--max-restarts", "1", "--log-dir", "logs", script)
    assert done.returncode == 1
    restart, failure, *notes, end = messages(done.stderr)
    assert (restart["kind"], restart["level"], restart["attempt"], restart["wait"]) == ("restart", "warning", 1, 0)
    assert failure["kind"] == "failure"
    assert failure["text"] == "rank 1 failed with ValueError: no labels (exit code 1)"
    kept = next(each["path"] for each in notes if "path" in each)
    assert failure["failure"] == json.loads((tmp_path / kept / "failure.json").read_text())
    assert (end["kind"], end["code"]) == ("end", 1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--nproc", "x", "train.py"), "--nproc x: expected"),
        (("--nprox", "2", "train.py"), "no such option: --nprox"),
        (("nothing.py",), "no such script: nothing.py"),
        (("--nproc",), "--nproc needs a value"),
        ((), "the target is missing"),
    ],
)
def test_a_refusal_is_an_object(words, text, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--log-json", *words)
    (error,) = messages(done.stderr)
    assert done.returncode == error["code"] == 2
    assert error["kind"] == "error"
    assert error["text"].startswith(text)


def test_the_variable_applies_to_run_only(run_in_fork):
    env = {"DDPLAUNCH_LOG_JSON": "1"}
    assert kinds(run_in_fork("run", "nothing.py", env=env).stderr) == ["error"]
    assert run_in_fork("run", "nothing.py", env={"DDPLAUNCH_LOG_JSON": "0"}).stderr.startswith("Error: ")
    assert run_in_fork("devices", "--nonsense", env=env).stderr.startswith("Error: ")


def test_notes_before_the_job(run_ddplaunch, tmp_path):
    script = write_program(tmp_path, "train.py", PRINTS)
    done = run_ddplaunch(*LOG_JSON, "--nproc", "2", script, env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"})
    note, end = messages(done.stderr)
    assert (note["kind"], end["kind"]) == ("note", "end")
    assert note["text"] == "read as options of torchrun: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    assert note["run_id"] == end["run_id"]


@pytest.mark.slow
def test_ctrl_c_and_waiting_in_a_terminal_draw_nothing(start_in_terminal, tmp_path):
    where = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    script = write_program(tmp_path, "train.py", PRINTS)
    terminal = start_in_terminal(*LOG_JSON[1:], "--nproc", "1", *where, script, columns=1000)
    terminal.until("waiting for node 1")
    terminal.type("\x03")
    assert terminal.end() == 130
    shown = terminal.raw.decode().replace("^C", "")
    assert "\x1b" not in shown
    first, *_, last = messages(shown)
    assert (first["kind"], last["kind"], last["code"]) == ("waiting", "end", 130)
    assert first["text"].startswith("1/2 nodes joined, waiting for node 1")


def test_a_closed_stderr_harms_nothing(tmp_path):
    script = write_program(tmp_path, "train.py", PRINTS)
    words = ddplaunch_command(*LOG_JSON, "--nproc", "2", script)
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *words], env=clean_environment(), cwd=tmp_path)
    assert done.returncode == 0
