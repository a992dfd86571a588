"""Tests of the values of options, their types, and where each comes from."""

from __future__ import annotations

from typing import get_type_hints

import click
import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.run_command import read_options, run
from ddplaunch.cli.run_options import COMMON_OPTIONS, PARAMS, SECTIONS, OptionSource, RunOptions
from ddplaunch.cli.target_args import ParseNotes


def options(*words: str) -> RunOptions:
    context = run.make_context("run", [*words])
    notes = context.find_object(ParseNotes)
    assert notes
    return read_options(context, notes)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("DDPLAUNCH_TOKEN", raising=False)


def test_every_field_is_an_option():
    assert [param.name for param in PARAMS] == [name for name in RunOptions.__match_args__ if name != "sources"]
    named = {name for names in SECTIONS.values() for name in names}
    assert named - {"--help", "--help-all"} == {param.opts[-1] for param in PARAMS} - {"target", "args"}
    assert set(COMMON_OPTIONS) <= named


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--nproc", "2", "--nnodes", "2:4", "--node-rank", "1", "--master-port", "1", "--grace", "3", "--stdin", "0"),
        ("--node-rank", "auto", "--preempt-signal", "none", "--preempt-forward", "USR1", "--env", "A=1", "--grow"),
    ],
)
def test_values_have_the_types_of_their_fields(words):
    values = options(*words, "train.py", "--lr", "1")
    hints = get_type_hints(RunOptions)
    for param in PARAMS:
        hint, value = hints[param.name], getattr(values, param.name)
        kinds = tuple(getattr(each, "__origin__", each) for each in getattr(hint, "__args__", None) or (hint,))
        if getattr(hint, "__origin__", None) is tuple:
            kinds = (tuple,)
        assert type(value) in kinds, (param.name, value)


def test_where_values_come_from(monkeypatch):
    monkeypatch.setenv("DDPLAUNCH_TOKEN", "s")
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    values = options("--nnodes", "2", "train.py", "--nproc", "4")
    assert values.token == "s"
    assert values.max_restarts == 3
    assert values.nproc == "4"
    sources = {name: values.sources[name] for name in ("nnodes", "nproc", "token", "max_restarts", "grace")}
    assert sources == {
        "nnodes": OptionSource.TYPED,
        "nproc": OptionSource.TYPED,
        "token": OptionSource.VARIABLE,
        "max_restarts": OptionSource.VARIABLE,
        "grace": OptionSource.DEFAULT,
    }
    assert [name for name in values.sources if values.is_set(name)] == [
        "nproc",
        "nnodes",
        "token",
        "max_restarts",
        "target",
    ]
    assert list(values.to_argv(excluded={"token"})) == ["--nproc", "4", "--nnodes", "2", "--max-restarts", "3"]


def test_what_is_inferred_goes_behind_what_is_set():
    typed = options("--nproc", "2", "train.py")
    filled = typed.with_defaults(OptionSource.CLUSTER, {"nproc": "8", "nnodes": (4, 4), "run_id": None})
    assert (filled.nproc, filled.nnodes, filled.run_id) == ("2", (4, 4), None)
    assert filled.inferred_names == ("nnodes",)
    assert (typed.nnodes, typed.inferred_names) == ((1, 1), ())
    with pytest.raises(AttributeError):
        filled.nproc = "3"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--grow=1 train.py", "Option '--grow' does not take"),
        ("--no-warm=1 train.py", "Option '--no-warm' does not take"),
        ("--control TCP train.py", "--control TCP: expected tcp or none"),
        ("--on-stall x --grace y train.py", "--on-stall x: expected stop, restart"),
        ("--grace y --on-stall x train.py", "--grace y: expected a time"),
    ],
)
def test_what_cannot_be_read(words, expected):
    with pytest.raises(UsageError) as raised:
        options(*words.split())
    assert raised.value.message.startswith(expected)


def test_the_last_value_counts_and_each_of_those_that_may_be_repeated():
    values = options("--nproc", "2", "--nproc=4", "--warm", "--no-warm", "--env", "A=1", "--env=B", "train.py")
    assert (values.nproc, values.warm, values.env) == ("4", False, ("A=1", "B"))


@pytest.mark.parametrize("asks", [["--help"], ["-h", "train.py"], ["--nproc", "x", "--grow=1", "--help-all"]])
def test_help_precedes_errors(asks, capsys):
    with pytest.raises(click.exceptions.Exit):
        options(*asks)
    assert "--nproc N" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "flag"), [("1", True), ("Yes", True), ("off", False), ("0", False), ("", False)])
def test_a_variable_that_stands_for_a_flag(text, flag, monkeypatch):
    monkeypatch.setenv("DDPLAUNCH_LOG_JSON", text)
    assert options("train.py").log_json is flag
    monkeypatch.setenv("DDPLAUNCH_LOG_JSON", "2")
    with pytest.raises(UsageError, match="DDPLAUNCH_LOG_JSON=2: expected 1 or 0"):
        options("train.py")
