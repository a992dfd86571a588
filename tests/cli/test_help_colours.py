"""Tests of help in a terminal: colours of ``--help``, and rendered pages."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from ddplaunch.cli.click_commands import _pages, cli
from ddplaunch.cli.page_view import render_page
from tests.conftest import ddplaunch_command
from tests.terminal_emulator import TerminalEmulator

PAGE = """# Title

Words about [hangs](hangs.md) and [several nodes](nodes.md#x), [torch](https://pytorch.org), `--nproc`.

![picture](a.svg)
<!-- a comment -->

```sh
$ ddplaunch run a-very-long-line-that-users-copy --nproc 2 --nnodes 2 --master-addr 10.0.0.1 train.py --lr 0.1
```

| a | b |
|---|---|
| 1 | 2 |
"""


def test_a_page_is_rendered():
    lines = render_page(PAGE, 60, colour=False).splitlines()
    text = "\n".join(lines)
    assert lines[0].strip() == "Title"
    assert "Words about hangs and several nodes (help nodes), torch\n(https://pytorch.org), --nproc." in text
    long = "  $ ddplaunch run a-very-long-line-that-users-copy --nproc 2 --nnodes 2 --master-addr 10.0.0.1 train.py"
    assert f"{long} --lr 0.1" in lines
    assert not re.search(r"[#`|\x1b]|picture|comment", text)
    coloured = click.unstyle(render_page(PAGE, 60, colour=True)).splitlines()
    assert [line.rstrip() for line in coloured] == lines
    assert "\x1b[1;32mTitle" in render_page(PAGE, 60, colour=True)


@pytest.mark.ci
def test_every_page_is_rendered():
    for path in _pages().values():
        with open(path, encoding="utf-8") as file:
            text = render_page(file.read(), 100, colour=False)
        assert not re.search(r"\]\(|^#|</", re.sub(r"(?m)^  .*$", "", text), re.MULTILINE), path


def test_help_has_colours_in_a_terminal_only(monkeypatch):
    coloured = CliRunner().invoke(cli, ["ps", "--help"], color=True).output
    plain = CliRunner().invoke(cli, ["ps", "--help"]).output
    assert "\x1b[32m\x1b[1mUsage:\x1b[0m" in coloured
    assert "\x1b[32m\x1b[1mOptions:\x1b[0m" in coloured
    assert "\x1b[36m--json\x1b[0m" in coloured
    assert click.unstyle(coloured) == plain
    assert "\x1b" not in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert CliRunner().invoke(cli, ["ps", "--help"], color=True).output == plain


def test_a_pipe_gets_markdown(run_in_fork):
    assert run_in_fork("help", "start").stdout.startswith("# Getting started\n")


def test_a_terminal_gets_a_rendered_page(tmp_path):
    shown = TerminalEmulator(ddplaunch_command("help", "start"), tmp_path, {"PAGER": "cat"})
    shown.until(lambda each: "Where to go next" in "\n".join(each.rows))
    assert "##" not in "\n".join(shown.rows)


def test_other_commands_do_not_import_rich():
    code = "import sys; from ddplaunch.cli import run_command, click_commands; print('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
