"""Tests that a new command needs a folder and a line in the list of features, in a copy of the package."""

from __future__ import annotations

from pathlib import Path

from tests.package_copy import add_feature, copy_package, run_copy

FEATURE = """
from ddplaunch.core.feature import Command, Feature


class Hello(Feature):
    commands = (Command("hello", "Greet."),)


FEATURE = Hello()
"""
COMMAND = """
import click


@click.command()
@click.option("--name", default="you")
def hello(name):
    click.echo(f"hello, {name}")
"""


def test_a_command_is_a_folder_and_a_line(tmp_path: Path):
    add_feature(copy_package(tmp_path), "hello", feature=FEATURE, command=COMMAND)
    assert run_copy(tmp_path, "hello", "--name", "Ada") == "hello, Ada\n"
    assert "Other:\n  hello       Greet.\n" in run_copy(tmp_path, "--help")
