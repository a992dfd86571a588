"""Tests of the failure report: each fact once, and hints for common mistakes."""

from __future__ import annotations

import ctypes
import os
import re
import sys

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.cli.lookup import run_index, running_jobs
from ddplaunch.core.failures import RankFailure, find_first_cause, format_early_report
from tests.conftest import ddplaunch_command, run_command, write_program
from tests.start_modes import LIGHT


def failure(rank: int, message: str) -> RankFailure:
    return RankFailure(rank, rank, "h", 1, 0, 1, None, message, "Traceback", float(rank), None)


def test_equal_failures_after_the_first_share_a_line():
    """Failures that differ only in the address of the peer are equal."""
    peers = [
        failure(rank, f"RuntimeError: Connection closed by peer [10.0.0.{rank}]:{9000 + rank}") for rank in (1, 2, 4)
    ]
    verdict = find_first_cause([failure(0, "ValueError: boom"), *peers, failure(3, "OSError: other")], 0, 5)
    lines = render_verdict(verdict, 1).splitlines()
    assert "  then ranks 1, 2, 4 failed: RuntimeError: Connection closed by peer [10.0.0.1]:9001" in lines
    assert sum("then rank" in line for line in lines) == 2


def test_a_message_is_cut_between_words():
    """Messages of torch begin with a place in its source, which would leave no room for the rest."""
    first = RankFailure(0, 0, "n0", 7, 0, 1, None, "ValueError: boom", None, 1.0, None)
    place = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "
    text = f"RuntimeError: {place}Connection closed by peer [127.0.0.1]:19544. " + "It may have ended. " * 9
    second = RankFailure(1, 1, "n0", 8, 0, 1, None, text, None, 2.0, None)
    (line,) = [
        each for each in render_verdict(find_first_cause([first, second], 0, 2), 1).splitlines() if "then" in each
    ]
    assert line.startswith("  then rank 1 failed: RuntimeError: … Connection closed by peer [127.0.0.1]:19544. It may")
    assert line.endswith((" It…", " may…", " have…", " ended…"))


def test_an_early_report_of_one_node():
    """The rank has printed its traceback."""
    expected = "rank 1 failed with ValueError; waiting up to 30 s (--grace) for the other ranks"
    assert format_early_report("rank 1 failed with ValueError: bad (exit code 1)", 30.0, ()) == expected


def test_a_rank_that_ended_with_0_before_a_lost_connection_is_named(run_ddplaunch, tmp_path):
    script = write_program(
        tmp_path,
        "loses_peer.py",
        """
        import os, socket, time
        if os.environ["RANK"] == "0":
            server = socket.create_server(("127.0.0.1", 0))
            with open("port.new", "w") as file:
                file.write(str(server.getsockname()[1]))
            os.rename("port.new", "port")
            server.accept()
            os._exit(0)
        while not os.path.exists("port"):
            time.sleep(0.01)
        peer = socket.create_connection(("127.0.0.1", int(open("port").read())))
        assert peer.recv(1) == b""
        raise RuntimeError("[/src/gloo/pair.cc:538] connection closed by peer")
        """,
    )
    done = run_ddplaunch("run", "--nproc", "2", *LIGHT, script)
    assert done.returncode == 1
    assert re.search(r"\n  rank 0 (had ended [\d.]+ s before|ended at that moment) \(exit code 0\)\n", done.stderr)


def test_a_keyboard_interrupt_of_one_rank_has_its_traceback(run_ddplaunch, tmp_path):
    """The terminal sent no Ctrl-C; rank 1, which is stopped after that, is not a failure."""
    script = write_program(
        tmp_path,
        "interrupts.py",
        """
        import os, signal, time
        if os.environ["RANK"] == "0":
            while not os.path.exists("ready"):
                time.sleep(0.01)
            raise KeyboardInterrupt("by the program")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        open("ready", "w")
        time.sleep(600)
        """,
    )
    done = run_ddplaunch("run", "--nproc", "2", *LIGHT, script)
    assert done.returncode == 130
    assert "ddplaunch: rank 0 failed with KeyboardInterrupt: by the program (exit code 130)\n" in done.stderr
    assert f'\n    File "{script}", line 5, in <module>\n' in done.stderr
    assert "\n  1 other rank was stopped\n" in done.stderr
    assert "then rank 1" not in done.stderr


@pytest.mark.ci
def test_hints_for_stdin_and_for_another_environment(run_ddplaunch, tmp_path):
    """The terminal, which --stdin gives, and the environment that is active in the shell."""
    script = write_program(tmp_path, "reads.py", "import os\nif os.environ['RANK'] == '1':\n    input()\n")
    assert "  stdin of this rank is empty; with --stdin 1 it reads the launcher's stdin\n" in run_ddplaunch(
        "run", "--nproc", "2", *LIGHT, script
    ).stderr  # fmt: skip
    python = write_program(tmp_path, "other/bin/python", "")
    script = write_program(tmp_path, "imports.py", "import nothing_of_this_name\n")
    env = {"VIRTUAL_ENV": str(tmp_path / "other")}
    words = ("run", "--nproc", "2", *LIGHT, script)
    hint = f"  the ranks use {sys.executable}; $VIRTUAL_ENV has another Python: {python} -m ddplaunch run …\n"
    assert hint in run_ddplaunch(*words, env=env).stderr
    assert "$VIRTUAL_ENV" not in run_ddplaunch(*words, env={"VIRTUAL_ENV": sys.prefix}).stderr


def test_an_empty_name_is_refused_and_a_negative_number_matches_nothing(monkeypatch):
    monkeypatch.setattr(run_index.history_store, "list_runs", lambda: ["run-1"])
    monkeypatch.setattr(running_jobs, "list_running", lambda: [])
    for ask in (run_index.find_run, run_index.find_running):
        with pytest.raises(UsageError, match="the name of the run is empty"):
            ask("")
    with pytest.raises(UsageError, match='no run named "-1"'):
        run_index.find_run("-1")


@pytest.mark.ci
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to name the machine")
def test_control_characters_of_the_host_name_are_escaped(tmp_path):
    """The record of the run can still be read."""
    library, name = ctypes.CDLL(None), b"a\x1b[31mred\x07\nddplaunch: fake\xff\xfe"

    def rename() -> None:
        library.unshare(0x04000000)
        library.sethostname(name, len(name))

    script = write_program(tmp_path, "fails.py", "raise SystemExit(3)\n")
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    words = (
        ["run", "--dry-run", "--prefix", "{host}", script],
        ["run", "--nproc", "2", *LIGHT, "--prefix", "{host}", "--run-id", "x", script],
        ["report", "x"],
    )
    for each, code in zip(words, (0, 3, 0), strict=True):
        done = run_command(ddplaunch_command(*each), tmp_path, environ, preexec_fn=rename, errors="surrogateescape")
        assert done.returncode == code, done.stderr
        assert not any(
            (ord(letter) < 32 and letter != "\n") or letter >= "\ud800" for letter in done.stdout + done.stderr
        )
        assert "\nddplaunch: fake" not in done.stdout + done.stderr
