"""Tests that a new command needs its file and its line in the table, in a copy of the package."""

from __future__ import annotations

from pathlib import Path

from tests.package_copy import copy_package, run_copy

TOY = '''"""``ddplaunch hello``."""

import click


@click.command()
@click.option("--name", default="you")
def hello(name):
    """Greet somebody."""
    click.echo(f"hello, {name}")
'''


def test_a_command_is_a_file_and_a_line(tmp_path: Path):
    package = copy_package(tmp_path)
    (package / "features" / "hello.py").write_text(TOY)
    table = package / "cli" / "click_commands.py"
    table.write_text(
        table.read_text().replace("COMMANDS = {\n", 'COMMANDS = {\n    "hello": ("features.hello", "Greet."),\n')
    )
    assert run_copy(tmp_path, "hello", "--name", "Ada") == "hello, Ada\n"
    assert "Other:\n  hello       Greet.\n" in run_copy(tmp_path, "--help")
