"""Tests that docs/reference.md agrees with the code and is complete."""

import re

import click
import pytest

from ddplaunch.cli.click_commands import cli
from ddplaunch.features.submit.slurm import OVERRIDE_VARIABLES
from tests.reference import records, variables
from tests.reference.page import NAME, PACKAGE, PAGE, all_caps, clusters, page

SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.reference writes it anew"


def test_every_variable_of_ours_is_listed():
    found = {name for path in SOURCES for name in re.findall(r"_?DDPLAUNCH_[A-Z_]+", path.read_text(encoding="utf-8"))}
    assert found == variables.OF_DDPLAUNCH.keys()


@pytest.mark.slow
def test_every_other_variable_in_the_source_is_listed():
    listed = {name for _, names in clusters() for name in names}
    for described in (variables.OF_DDPLAUNCH, variables.OF_RANKS, variables.SOMETIMES, variables.READ):
        listed |= described.keys()
    found = {name for path in SOURCES for name in all_caps(path)} - set(
        OVERRIDE_VARIABLES.values()
    )  # only hidden from sbatch
    assert found - listed - variables.NO_VARIABLES == set()
    assert {name for name in listed if NAME.fullmatch(name)} - found == set()


def test_every_rank_gets_what_the_page_says():
    ranks_get = set(records.plan_environment()) | {"TORCHELASTIC_ERROR_FILE"}
    assert ranks_get == {*variables.OF_RANKS, "DDPLAUNCH_DEVICE"}


def test_every_field_is_described():
    verdict, failure = records.failure_fields()
    assert records.plan_fields() == list(records.PLAN)
    assert records.devices_fields() == list(records.DEVICES)
    assert records.runs_fields() == list(records.RUNS)
    assert records.record_fields() == list(records.RECORD)
    assert records.inspection_fields() == list(records.INSPECTION)
    assert records.stacks_fields() == list(records.STACKS)
    assert set(records.events()) == set(records.EVENTS)
    assert (verdict, failure) == (list(records.VERDICT), list(records.FAILURE))


def test_every_option_has_its_place():
    text = PAGE.read_text(encoding="utf-8")
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        part = text.partition(f"\n## ddplaunch {name}\n")[2].partition("\n## ")[0]
        if name in ("submit", "manifest"):  # which take those of run too
            part += text.partition("\n## ddplaunch run\n")[2].partition("\n## ")[0]
        for param in command.params:
            shown = isinstance(param, click.Option) and not param.hidden
            for word in (*param.opts, *param.secondary_opts) if shown else ():
                listed = rf"^(\| |As for `.*`: (.*, )?)`([^`]* )?{word}[ ,`]"
                assert re.search(listed, part, re.MULTILINE), f"{name} {word}"
