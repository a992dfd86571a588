"""Tests that docs/reference.md, docs/variables.md and docs/json.md agree with the code and are complete."""

import re

import click
import pytest

from ddplaunch.cli.click_commands import cli
from ddplaunch.features.submit.slurm import OVERRIDE_VARIABLES
from tests.reference import page, records
from tests.reference.page import NAME, PACKAGE, PAGE, read_lists, read_section

SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page.render_page(), "python -m tests.reference writes it anew"


def test_every_variable_of_ours_is_listed():
    found = {name for path in SOURCES for name in re.findall(r"_?DDPLAUNCH_[A-Z_]+", path.read_text(encoding="utf-8"))}
    assert found == read_variables("ddplaunch's own")


@pytest.mark.ci
def test_every_other_variable_in_the_source_is_listed():
    listed = set(re.findall(r"`(\w+)`", read_section("### What is read of clusters")))
    for heading in ("ddplaunch's own", "What every rank gets", "What ranks get in some jobs", "What ddplaunch reads"):
        listed |= read_variables(heading)
    found = {name for path in SOURCES for name in page.list_upper_case_strings(path)}
    found -= set(OVERRIDE_VARIABLES.values())  # only hidden from sbatch
    assert found - listed - page.NO_VARIABLES == set()
    others = listed - read_variables("ddplaunch's own")  # which a name of an option may make
    assert {name for name in others if NAME.fullmatch(name)} - found == set()


def read_variables(heading: str) -> set[str]:
    (found,) = read_lists(f"### {heading}")
    return {*found}


def test_every_exit_code_of_the_launcher_is_described():
    codes = re.findall(
        r"^(EXIT_\w+) = (\d+)$", (PACKAGE / "base" / "errors.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert codes
    for name, number in codes:
        row = rf"^\| {number}( \+ N)? \| .*\(`{name}`\) \|$"
        assert re.search(row, read_section("## Exit codes"), re.MULTILINE), name


def test_every_rank_gets_what_the_page_says():
    ranks_get = set(records.make_plan_environment()) | {"TORCHELASTIC_ERROR_FILE"}
    assert ranks_get == {*read_variables("What every rank gets"), "DDPLAUNCH_DEVICE"}


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("The dry run as JSON", records.list_plan_fields),
        ("The devices as JSON", records.list_devices_fields),
        ("The runs as JSON", records.list_runs_fields),
        ("A run as JSON", records.list_record_fields),
        ("The stacks as JSON", lambda: (records.list_inspection_fields(), records.list_stacks_fields())),
        ("failure.json", records.list_failure_fields),
    ],
)
def test_every_field_is_described(heading, fields):
    found = fields() if isinstance(fields(), tuple) else (fields(),)
    assert [list(each) for each in read_lists(f"## {heading}")][: len(found)] == list(found)


def test_every_event_is_described():
    (found,) = read_lists("## events.jsonl")
    assert {name: re.findall(r"`(\w+)`", cell) for name, cell in found.items()} == records.list_event_fields()


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
                listed = rf"^(- |As for `.*`: (.*, )?)`([^`]* )?{word}[ ,`]"
                assert re.search(listed, part, re.MULTILINE), f"{name} {word}"
