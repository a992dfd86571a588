"""Tests of ``--prefix``: the prefix of each line of a rank."""

from __future__ import annotations

import socket

import pytest

from tests.conftest import write_program
from tests.start_modes import LIGHT

HOST = socket.gethostname()
PRINTS = "print('hello')\n"


@pytest.fixture
def script(tmp_path):
    return write_program(tmp_path, "train.py", PRINTS)


@pytest.mark.parametrize(
    ("words", "environ", "lines"),
    [
        (("--prefix", "{host}:{rank}: "), {}, [f"{HOST}:{rank}: hello" for rank in (0, 1)]),
        (
            ("--role", "trainer"),
            {"DDPLAUNCH_PREFIX": "é {role} n{node_rank} l{local_rank} →"},
            [f"é trainer n0 l{rank} → hello" for rank in (0, 1)],
        ),
        (("--log-line-prefix-template", "${hostname}:${rank}: "), {}, [f"{HOST}:{rank}: hello" for rank in (0, 1)]),
        (
            (),
            {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "$role_name|$local_rank"},
            ["default|0 hello", "default|1 hello"],
        ),
    ],
)
def test_templates_of_an_option_and_of_a_variable(words, environ, lines, run_ddplaunch, script):
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", *words, script, env=environ)
    assert sorted(done.stdout.splitlines()) == lines, done.stderr


def test_short_prefixes_are_padded(run_ddplaunch, script):
    done = run_ddplaunch("run", *LIGHT, "--nproc", "11", "--prefix", "rank {rank}", "--show", "9,10", script)
    assert sorted(done.stdout.splitlines()) == ["rank 10 hello", "rank 9  hello"]


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (
            ("--prefix", "{hostname}"),
            "--prefix {hostname}: unknown field {hostname}",
            "known: {rank}, {local_rank}, {node_rank}, {host}, {role}",
        ),
        (("--prefix", "${rank}:"), "--prefix ${rank}:: {rank} has a $ before it", "--prefix '{rank}:'"),
        (("--prefix", "[{rank]"), "--prefix [{rank]: unbalanced brace", "known: "),
        (("--prefix", "a\nb"), r"--prefix a\nb: control characters are not allowed", "use letters"),
        (("--prefix", "\x1b[31m{rank}"), "--prefix {rank}: control characters are not allowed", "use letters"),
        (("--prefix", " "), "--prefix is blank", "--prefix none omits the prefix"),
        (("--prefix", ""), "--prefix has an empty value", ""),
        (
            ("--log-line-prefix-template", "${pid}"),
            "--log-line-prefix-template ${pid}: unknown macro ${pid}",
            "known: ${role_name}, ${hostname}, ${rank}, ${local_rank}",
        ),
    ],
)
def test_invalid_templates_are_refused(words, message, hint, run_in_fork, script):
    done = run_in_fork("run", "--nproc", "2", *words, script)
    assert done.returncode == 2
    first, *rest = done.stderr.splitlines()
    assert first == f"Error: {message}"
    assert " ".join(rest).strip().startswith(hint)


SHOWS_ROW = """
    import os, time
    print("hello", os.environ["RANK"])  # equal lines would be merged, or not, by when they arrive
    print("\\rbar", end="", flush=True)
    while not os.path.exists("seen"):
        time.sleep(0.01)
"""


@pytest.mark.ci
def test_in_a_terminal_it_has_the_colour_of_the_rank(start_in_terminal, tmp_path):
    script, seen = write_program(tmp_path, "train.py", SHOWS_ROW), tmp_path / "seen"

    def show(prefix: str, *options: str, env: dict[str, str] | None = None) -> bytes:
        terminal = start_in_terminal(*LIGHT, "--nproc", "2", *options, script, env=env)
        terminal.until(lambda each: all(f"{prefix}{text}".encode() in each.raw for text in ("hello 0", "bar")))
        seen.touch()
        assert terminal.end() == 0
        seen.unlink()
        return terminal.raw

    show(f"\x1b[36m0@{HOST}\x1b[0m ", "--prefix", "{rank}@{host}")
    show("[0] ", env={"TERM": "dumb"})
    assert b"\x1b[36m" not in show("", "--prefix", "none")
