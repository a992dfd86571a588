"""A new command is its file and its line in the table: a toy one, added to a copy of the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import ddplaunch
from tests.conftest import clean_environment

TOY = '''"""``ddplaunch hello``."""

import click


@click.command()
@click.option("--name", default="you")
def hello(name):
    """Greet somebody."""
    click.echo(f"hello, {name}")
'''


def test_a_command_is_a_file_and_a_line(tmp_path: Path):
    package = shutil.copytree(
        Path(ddplaunch.__file__).parent, tmp_path / "ddplaunch", ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "commands" / "hello.py").write_text(TOY)
    table = package / "cli" / "commands.py"
    table.write_text(
        table.read_text().replace("COMMANDS = {\n", 'COMMANDS = {\n    "hello": ("commands.hello", "Greet."),\n')
    )

    def say(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "ddplaunch", *words],
            env={**clean_environment(), "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert say("hello", "--name", "Ada") == "hello, Ada\n"
    assert "hello     Greet.\n" in say("--help")
