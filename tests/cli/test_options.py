"""Tests of the values of options, their types, and where each comes from."""

from __future__ import annotations

from typing import Annotated, get_type_hints

import click
import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options, OptionSource, declared_options
from ddplaunch.cli.run_command import run
from ddplaunch.cli.run_options import COMMON_OPTIONS, GROUPS, OPTIONS, PARAMS, SECTIONS, arrange_groups
from ddplaunch.cli.target_args import ParseNotes
from ddplaunch.core.options import DryRun, Logging, Nodes, Output, RanksPerNode, Stopping, TimeLimit
from ddplaunch.core.output.log_message import FORMATTER
from ddplaunch.features.ssh.options import SshHosts
from ddplaunch.features.warm.options import Warming


def options(*words: str) -> Options:
    context = run.make_context("run", [*words])
    notes = context.find_object(ParseNotes)
    assert notes
    return Options.from_click(GROUPS, context, notes.from_variables)


@pytest.fixture(autouse=True)
def no_side_effects(monkeypatch):
    monkeypatch.delenv("DDPLAUNCH_TOKEN", raising=False)
    monkeypatch.setattr(FORMATTER, "as_json", False)  # set by parsing


def test_every_option_has_one_name_and_one_heading():
    assert [param.name for param in PARAMS] == [option.name for option in OPTIONS]
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    named = {name for names in SECTIONS.values() for name in names}
    assert named - {"--help", "--help-all"} == {param.opts[-1] for param in PARAMS} - {"target", "args"}
    assert set(COMMON_OPTIONS) <= named


class Early(OptionGroup, frozen=True):
    heading = "Time limits"
    after = "timeout"

    early: Annotated[bool, Option("--early")] = False


class Earlier(OptionGroup, frozen=True):
    heading = "Time limits"
    after = "early"

    earlier: Annotated[bool, Option("--earlier")] = False


class Elsewhere(OptionGroup, frozen=True):
    elsewhere: Annotated[bool, Option("--elsewhere")] = False


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ((Early,), (TimeLimit, Early, Output, DryRun)),
        ((Earlier, Early), (TimeLimit, Early, Earlier, Output, DryRun)),  # whatever the order of the features
        ((Earlier,), (TimeLimit, Earlier, Output, DryRun)),  # the feature that it follows is missing
        ((Elsewhere,), (TimeLimit, Output, Elsewhere, DryRun)),
    ],
)
def test_a_group_of_a_feature_follows_the_option_that_it_names(added, expected):
    assert tuple(arrange_groups((TimeLimit, Output, DryRun), added)) == expected


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
    for group in GROUPS:
        hints = get_type_hints(group)
        for name in group.__struct_fields__:
            hint = hints[name]
            kinds = tuple(getattr(each, "__origin__", each) for each in getattr(hint, "__args__", None) or (hint,))
            if getattr(hint, "__origin__", None) is tuple:
                kinds = (tuple,)
            assert type(getattr(values[group], name)) in kinds, name


def test_the_declared_default_is_the_value_without_the_option():
    values = options("train.py")
    for group in GROUPS:
        for option in declared_options(group):
            if not option.is_argument:
                assert getattr(values[group], option.name) == option.default, option.name


def test_where_values_come_from(monkeypatch):
    monkeypatch.setenv("DDPLAUNCH_TOKEN", "s")
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    values = options("--nnodes", "2", "train.py", "--nproc", "4")
    assert values[Nodes].token == "s"
    assert values[Stopping].max_restarts == 3
    assert values[RanksPerNode].nproc == "4"
    sources = {name: values.sources[name] for name in ("nnodes", "nproc", "token", "max_restarts", "grace")}
    assert sources == {
        "nnodes": OptionSource.TYPED,
        "nproc": OptionSource.TYPED,
        "token": OptionSource.VARIABLE,
        "max_restarts": OptionSource.VARIABLE,
        "grace": OptionSource.DEFAULT,
    }
    given = [each.name for each in OPTIONS if not each.is_argument and values.is_set(each.name)]
    assert given == ["nproc", "nnodes", "token", "max_restarts"]
    assert list(values.to_argv(excluded={"token"})) == ["--nproc", "4", "--nnodes", "2", "--max-restarts", "3"]


def test_what_is_inferred_goes_behind_what_is_set():
    typed = options("--nproc", "2", "train.py")
    filled = typed.with_defaults(OptionSource.CLUSTER, {"nproc": "8", "nnodes": (4, 4), "run_id": None})
    assert (filled[RanksPerNode].nproc, filled[Nodes].nnodes, filled[Nodes].run_id) == ("2", (4, 4), None)
    assert filled.names_from_cluster == ("nnodes",)
    assert (typed[Nodes].nnodes, typed.names_from_cluster) == ((1, 1), ())
    with pytest.raises(AttributeError):
        filled[RanksPerNode].nproc = "3"  # type: ignore[misc]


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
def test_invalid_options_are_refused(words, expected):
    with pytest.raises(UsageError) as raised:
        options(*words.split())
    assert raised.value.message.startswith(expected)


def test_a_number_is_no_name_of_a_run():
    with pytest.raises(UsageError) as raised:
        options("--name", "17", "train.py")
    assert raised.value.message == "--name 17: a number is that of a job or a process"
    assert raised.value.hint == "--name run-17"
    assert options("--name", "run-17", "train.py")[Nodes].name == "run-17"


def test_the_last_value_counts_and_each_of_those_that_may_be_repeated():
    values = options("--nproc", "2", "--nproc=4", "--warm", "--no-warm", "--env", "A=1", "--env=B", "train.py")
    assert (values[RanksPerNode].nproc, values[Warming].warm, values[SshHosts].env) == ("4", False, ("A=1", "B"))


@pytest.mark.parametrize("asks", [["--help"], ["-h", "train.py"], ["--nproc", "x", "--grow=1", "--help-all"]])
def test_help_precedes_errors(asks, capsys):
    with pytest.raises(click.exceptions.Exit):
        options(*asks)
    assert "--nproc N" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "flag"), [("1", True), ("Yes", True), ("off", False), ("0", False), ("", False)])
def test_a_variable_that_stands_for_a_flag(text, flag, monkeypatch):
    monkeypatch.setenv("DDPLAUNCH_LOG_JSON", text)
    assert options("train.py")[Logging].log_json is flag
    monkeypatch.setenv("DDPLAUNCH_LOG_JSON", "2")
    with pytest.raises(UsageError, match="DDPLAUNCH_LOG_JSON=2: expected 1 or 0"):
        options("train.py")
