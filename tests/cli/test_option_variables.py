"""Tests of options by variable: DDPLAUNCH_NPROC=2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.cli.option_variables import OPTION_VARIABLES, drop_option_variables, unknown_variable_notes
from ddplaunch.cli.run_options import OPTIONS
from tests.conftest import assert_refused, write_program


def test_every_option_has_a_variable_of_its_own():
    without = {option.opts[-1] for option in OPTIONS if not option.variable and not option.is_argument}
    assert without == {"--nnodes", "--node-rank", "--hosts", "--code", "--program"}
    assert len(OPTION_VARIABLES) == len([option for option in OPTIONS if option.variable])
    assert {"DDPLAUNCH_NPROC", "DDPLAUNCH_MAX_RESTARTS", "DDPLAUNCH_TOKEN", "DDPLAUNCH_CHECK"} < OPTION_VARIABLES


def test_a_variable_sets_an_option_and_no_rank_has_it(run_ddplaunch, tmp_path):
    names = "sorted(name for name in os.environ if name in ('DDPLAUNCH_NPROC', 'DDPLAUNCH_START', 'OTHER'))"
    write_program(tmp_path, "train.py", f"import os; print({names})\n")
    environ = {"DDPLAUNCH_NPROC": "2", "DDPLAUNCH_START": "exec", "OTHER": "1"}
    done = run_ddplaunch("run", "train.py", env=environ)
    assert sorted(done.stdout.splitlines()) == ["[0] ['OTHER']", "[1] ['OTHER']"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("environ", "words", "shown"),
    [
        ({"DDPLAUNCH_NPROC": "2"}, "--nproc 3", "3 ranks on 1 node"),
        ({"DDPLAUNCH_NPROC": ""}, "", "1 rank on 1 node"),
        ({"DDPLAUNCH_NPROC": "2", "DDPLAUNCH_NOTIFY": "echo a b"}, "", "notified of events: echo a b"),
        ({"DDPLAUNCH_NPROC": "2", "DDPLAUNCH_OVER_SSH": "1"}, "", "1 rank on 1 node"),
        ({"DDPLAUNCH_PREFIX": "{rank}: ", "DDPLAUNCH_NPROC": "2"}, "", "2 ranks on 1 node"),
        ({"DDPLAUNCH_NNODES": "2"}, "", "1 rank on 1 node"),
        ({"DDPLAUNCH_NPROCS": "2"}, "", "DDPLAUNCH_NPROCS has no effect: did you mean DDPLAUNCH_NPROC?"),
    ],
)
def test_dry_runs(run_in_fork, tmp_path, environ, words, shown):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", *words.split(), "--dry-run", "train.py", env=environ)
    assert done.returncode == 0
    assert shown in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GRACE", "soon", "DDPLAUNCH_GRACE=soon: expected a time"),
        ("START", "fork", "DDPLAUNCH_START=fork: expected auto, zygote or exec"),
        ("CHECK", "maybe", "DDPLAUNCH_CHECK=maybe: expected 1 or 0"),
    ],
)
def test_errors_name_the_variable(run_in_fork, tmp_path, name, value, message):
    write_program(tmp_path, "train.py", "")
    assert_refused(run_in_fork("run", "train.py", env={f"DDPLAUNCH_{name}": value}), message)


def test_unknown_variables():
    assert unknown_variable_notes({"DDPLAUNCH_FOO": "1"}) == ("DDPLAUNCH_FOO has no effect: there is no such option",)
    known = ("NPROC", "HOSTS", "DEVICE", "VLLM_ADDRESS", "TMPDIR", "TESTS")
    assert unknown_variable_notes({f"DDPLAUNCH_{name}": "1" for name in known}) == ()
    assert unknown_variable_notes({"DDPLAUNCH_FOO": "1", "DDPLAUNCH_DEVICE": "cpu"}) == ()  # in a rank


def test_every_variable_in_the_source_is_known():
    texts = [path.read_text() for path in Path(ddplaunch.__file__).parent.rglob("*.py")]
    names = {name for text in texts for name in re.findall(r"\bDDPLAUNCH_[A-Z_]+", text)}
    assert unknown_variable_notes(dict.fromkeys(names - {"DDPLAUNCH_DEVICE"}, "1")) == ()


def test_a_launcher_over_ssh_gets_options_as_words():
    kept = {"DDPLAUNCH_OVER_SSH": "1", "DDPLAUNCH_TOKEN": "s", "DDPLAUNCH_DOMAIN": "rack-7", "HOME": "/"}
    environ = {**kept, "DDPLAUNCH_NPROC": "2"}
    drop_option_variables(environ)
    assert environ == kept
