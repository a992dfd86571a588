"""The values of options, their types, and where each comes from."""

from __future__ import annotations

from typing import get_type_hints

import click
import pytest

from ddplaunch.cli.options import COMMON, SECTIONS, Options, Source
from ddplaunch.cli.parameters import PARAMS, read
from ddplaunch.cli.run_command import run
from ddplaunch.cli.target_command import remarks


def options(*words: str) -> Options:
    with click.Context(run, info_name="run") as outer, run.make_context("run", [*words], outer) as context:
        return read(context, remarks().from_variables)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("DDPLAUNCH_TOKEN", raising=False)


def test_every_field_is_an_option():
    assert [param.name for param in PARAMS] == [name for name in Options.__match_args__ if name != "sources"]
    named = {name for names in SECTIONS.values() for name in names}
    assert named - {"--help", "--help-all"} == {param.opts[-1] for param in PARAMS} - {"target", "args"}
    assert set(COMMON) <= named


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
    hints = get_type_hints(Options)
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
        "nnodes": Source.TYPED,
        "nproc": Source.TYPED,
        "token": Source.VARIABLE,
        "max_restarts": Source.VARIABLE,
        "grace": Source.DEFAULT,
    }
    assert [name for name in values.sources if values.is_set(name)] == [
        "nproc",
        "nnodes",
        "token",
        "max_restarts",
        "target",
    ]
    assert list(values.words(without={"token"})) == ["--nproc", "4", "--nnodes", "2", "--max-restarts", "3"]


def test_what_is_inferred_goes_behind_what_is_set():
    typed = options("--nproc", "2", "train.py")
    filled = typed.filled(Source.SURROUNDINGS, {"nproc": "8", "nnodes": (4, 4), "run_id": None})
    assert (filled.nproc, filled.nnodes, filled.run_id) == ("2", (4, 4), None)
    assert filled.inferred == ("nnodes",)
    assert (typed.nnodes, typed.inferred) == ((1, 1), ())
    with pytest.raises(AttributeError):
        filled.nproc = "3"  # type: ignore[misc]
