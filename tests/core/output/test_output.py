"""Tests of ranks' output on the screen: complete lines, progress bars, nothing lost, and slow readers."""

from __future__ import annotations

import collections
import json
import os
import pty
import re
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.conftest import PROGRAMS, clean_environment, ddplaunch_command, write_program
from tests.constant_override import launcher_with_constant
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT


@pytest.fixture
def printer(tmp_path):
    """A script that runs its own body after ``rank`` is known."""

    def make(body: str, name: str = "printer.py") -> Path:
        head = "import os, sys, time\nrank = int(os.environ['RANK'])\nout = sys.stdout\n"
        return write_program(tmp_path, name, head + textwrap.dedent(body))

    return make


def test_a_pty_for_stdout_alone_is_not_interactive(tmp_path, printer):
    """srun -u and mpirun make such a pty, and write its output to a log."""
    script = printer("print('\\rstep 1\\rstep 2', os.environ.get('DDPLAUNCH_TERMINAL'), out.line_buffering)")
    ours, theirs = pty.openpty()
    words = ddplaunch_command("run", "--nproc", "2", *LIGHT, script)
    env = clean_environment({"TERM": "xterm-256color"})
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdout=theirs, start_new_session=True, **quiet) as process:
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert sorted(os.read(ours, 4096).split(b"\r\n")) == [b"", *(b"[%d] step 2 None True" % rank for rank in (0, 1))]
    os.close(ours)
    os.close(theirs)


def test_an_error_breaks_between_words(start_in_terminal, tmp_path):
    """A terminal would break it anywhere."""
    (tmp_path / "train.py").write_text("")
    terminal = start_in_terminal("--nproc", "2", "--show", "4", "train.py", columns=44)
    assert terminal.end() == 2
    assert terminal.history == ["Error: --show 4: the job has ranks 0 to 1", "  all, none, or ranks like 0"]
    terminal = start_in_terminal("--grow", "--nnodes", "2", "--node-rank", "0", "train.py", columns=40)
    assert terminal.end() == 2
    assert terminal.history[:2] == ["Error: --grow does not work with", "  --nnodes 2"]


@pytest.mark.slow
def test_lines_are_whole_and_in_order(run_ddplaunch, printer):
    """Two ranks print fast on both streams: no line is torn, lost or out of order."""
    script = printer(
        """
        for i in range(5000):
            print("line", i, "of rank", rank, "x" * (i % 80))
            if i % 10 == 0:
                print("error", i, "of rank", rank, file=sys.stderr)
        """
    )
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", script)
    assert done.returncode == 0
    for text, word, step in ((done.stdout, "line", 1), (done.stderr, "error", 10)):
        seen = collections.defaultdict(list)
        for line in text.splitlines():
            match = re.fullmatch(rf"\[(\d)\] {word} (\d+) of rank (\d)( x*)?", line)
            assert match, line
            assert match[1] == match[3]
            seen[match[1]].append(int(match[2]))
        assert seen == {"0": list(range(0, 5000, step)), "1": list(range(0, 5000, step))}


@pytest.mark.smoke
def test_show_selects_ranks_and_the_log_has_all(run_ddplaunch, tmp_path, printer):
    script = printer("print('out', rank); print('err', rank, file=sys.stderr)")
    done = run_ddplaunch("run", *LIGHT, "--nproc", "3", "--show", "0,2", "--log-dir", "logs", script)
    assert {int(line.split()[-1]) for line in done.stdout.splitlines()} == {0, 2}
    assert {int(line.split()[-1]) for line in done.stderr.splitlines() if line.startswith("[")} == {0, 2}
    for rank in range(3):
        assert next(tmp_path.glob(f"logs/*/rank-{rank}.log")).read_text().split() == [
            "out", str(rank), "err", str(rank),
        ]  # fmt: skip


def test_a_single_rank_inherits_the_launchers_streams(run_ddplaunch, printer):
    """One rank writes directly to the terminal or pipe, without a prefix."""
    script = printer("print('plain'); print(os.readlink('/proc/self/fd/1') == os.readlink(f'/proc/{L}/fd/1'))")
    script.write_text(script.read_text().replace("{L}", "{int(sys.argv[1])}"))
    reader, writer = os.pipe()
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" $$', "sh", *ddplaunch_command("run", script)], stdout=writer, env=clean_environment()
    )
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "plain\nTrue\n"
    assert process.wait(scaled_timeout(60)) == 0


def test_lines_appear_immediately_in_a_pipe(start_ddplaunch, printer):
    """Without flush; what a rank has printed before it is killed is shown, and in its report. Bytes stay buffered."""
    script = printer(
        """
        out.buffer.write(b"flushed\\n")
        out.buffer.flush()
        print("early", rank)
        out.buffer.write(b"bytes\\n")
        time.sleep(1000)
        """
    )
    job = start_ddplaunch("run", "--nproc", "2", *LIGHT, script)
    job.wait_for("early", 2)
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.wait() == 137
    assert sorted(job.stdout().splitlines()) == ["[0] early 0", "[0] flushed", "[1] early 1", "[1] flushed"]
    assert "  | early" in job.stderr()
    assert "  | bytes" not in job.stderr()


def test_a_bar_is_redrawn_in_place_in_a_terminal(start_in_terminal, printer):
    """One bar, of the lowest rank, on one row; ordinary lines pass above it and at the end it stays."""
    script = printer(
        """
        for i in range(5):
            sys.stderr.write(f"\\r{i * 25:3d}% of rank {rank}")
            sys.stderr.flush()
            print("step", i, "of rank", rank)
            time.sleep(0.05)
        sys.stderr.write("\\n")
        """
    )
    terminal = start_in_terminal(*LIGHT, "--nproc", "2", script)
    assert terminal.end() == 0
    rows = terminal.history
    assert sorted(row for row in rows if "%" in row) == ["[0] 100% of rank 0", "[1] 100% of rank 1"]
    assert sorted(row for row in rows if "step" in row) == sorted(
        f"[{rank}] step {i} of rank {rank}" for rank in range(2) for i in range(5)
    )


def test_a_bar_wider_than_the_terminal_is_cut(start_in_terminal, printer, tmp_path):
    """A wrapped row cannot be redrawn."""
    script = printer("sys.stderr.write('\\r' + 'w' * 300)\nwhile not os.path.exists('seen'): time.sleep(0.01)\n")
    terminal = start_in_terminal(*LIGHT, "--nproc", "2", script)
    terminal.until("w" * 51)
    assert 50 < terminal.raw.split(b"\x1b[K")[0].count(b"w") < 100
    (tmp_path / "seen").touch()
    assert terminal.end() == 0


def test_pdb_on_one_rank(start_in_terminal, tmp_path):
    """--stdin gives one rank the terminal: its prompt is shown, what is typed arrives, the others get nothing."""
    script = write_program(
        tmp_path,
        "debugged.py",
        """
        import os, sys
        rank = int(os.environ["RANK"])
        if rank == 1:
            breakpoint()
        print("rank", rank, "read", repr(sys.stdin.read()) if rank != 1 else "")
        """,
    )
    terminal = start_in_terminal(*LIGHT, "--nproc", "2", "--stdin", "1", script)
    terminal.until("(Pdb)")
    terminal.type("p rank + 41\n")
    terminal.until("42")
    terminal.type("c\n")
    assert terminal.end() == 0
    assert any("[0] rank 0 read ''" in row for row in terminal.history)  # perhaps in the row of the prompt


FALLS = """
import os, signal, sys, time
def meet():
    raise ConnectionError("[/src/gloo/pair.cc:538] Connection closed by peer [127.0.0.1]:1")
def announce(what):
    open(what + os.environ["TORCHELASTIC_RUN_ID"], "w").close()
def wait_for(what):
    while not os.path.exists(what + os.environ["TORCHELASTIC_RUN_ID"]):
        time.sleep(0.01)
rank = int(os.environ["RANK"])
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it falls by itself, as soon as it can
    announce("zero")
    wait_for("two")
if rank == 1:
    wait_for("zero")
    wait_for("two")
    raise ValueError("the cause")
if rank == 2:
    try:
        meet()
    except ConnectionError:
        import traceback
        traceback.print_exc()
        print("rank 2 goes on", file=sys.stderr, flush=True)
        announce("two")
        time.sleep(600)
meet()
"""


@pytest.mark.ci
def test_secondary_failures_have_one_line_each_in_a_terminal(run_ddplaunch, start_in_terminal, tmp_path):
    """In a terminal the report alone has the cause's traceback; the log folder and an explicit --show have all."""
    write_program(tmp_path, "train.py", FALLS)
    words = (*LIGHT, "--nproc", "3", "--grace", "20", "--log-dir", "logs")
    later = launcher_with_constant(tmp_path, "core.output.screen.TRACEBACK_S", scaled_timeout(10))
    terminal = start_in_terminal(*words, "train.py", env={"NO_COLOR": "1"}, launcher=later)
    assert terminal.end() == 1
    shown = terminal.raw.decode().replace("\r\n", "\n")
    assert (
        "[0] ConnectionError: … Connection closed by peer [127.0.0.1]:1 (traceback left out; to see it: --show all)\n"
        in shown
    )
    assert "[0] Traceback" not in shown
    assert shown.count('raise ValueError("the cause")') == 1
    assert '\n  Traceback (most recent call last):\n    File "' in shown
    assert "[2] Traceback" in shown, "what is no rank's end is whole"
    assert "[2] ConnectionError: [/src" in shown
    assert "[2] rank 2 goes on\n" in shown
    (log,) = (tmp_path / "logs").glob("*/rank-0.log")
    assert "in meet" in log.read_text()
    terminal = start_in_terminal(*words, "--show", "all", "train.py")
    assert terminal.end() == 1
    assert terminal.raw.count(b'raise ValueError("the cause")') == 2
    assert "[0] Traceback" in run_ddplaunch("run", *words, "train.py").stderr, "nor in a file"


@pytest.mark.slow
def test_a_traceback_not_in_a_report_is_shown(start_in_terminal, tmp_path):
    """That of an attempt before a restart, and that of a rank that failed second."""
    script = write_program(
        tmp_path,
        "train.py",
        """
        import os, signal, time
        rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]

        def fail(number, frame):
            raise KeyError(rank)

        signal.signal(signal.SIGTERM, fail)
        open(f"ready-{rank}-{attempt}", "w").close()
        while rank != 1 or not all(os.path.exists(f"ready-{each}-{attempt}") for each in (0, 2)):
            time.sleep(0.01)
        raise ValueError(f"attempt {attempt}")
        """,
    )
    words = (*LIGHT, "--nproc", "3", "--max-restarts", "1", "--restart-on", "always", "--min-uptime", "0")
    terminal = start_in_terminal(*words, script, env={"NO_COLOR": "1"})
    assert terminal.end() == 1
    shown = terminal.raw.decode()
    assert shown.count("[1] ValueError: attempt 0") == 1, shown
    assert all(len(re.findall(rf"\[{rank}\] +KeyError: {rank}", shown)) == 2 for rank in (0, 2)), shown
    assert "\n  ValueError: attempt 1" in shown.replace("\r\n", "\n")


def test_torchs_prefix_is_not_repeated(run_ddplaunch, tmp_path):
    write_program(
        tmp_path,
        "train.py",
        """
        import os, sys
        rank = os.environ["RANK"]
        print(f"[rank{rank}]: Traceback\\n[rank{rank}]: at [rank{rank}]: x\\n[rank7]: other", file=sys.stderr)
        """,
    )
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "train.py")
    for rank in (0, 1):
        mine = [line for line in done.stderr.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [f"[{rank}] Traceback", f"[{rank}] at [rank{rank}]: x", f"[{rank}] [rank7]: other"]
    plain = run_ddplaunch("run", *LIGHT, "--nproc", "2", "--prefix", "none", "train.py")
    assert "[rank1]: Traceback" in plain.stderr.splitlines()


def test_the_terminal_settings_are_restored(start_in_terminal, tmp_path):
    """A rank that is killed while the terminal does not echo leaves it as the shell had it."""
    text = "import tty, time; tty.setraw(0); print('raw', flush=True); time.sleep(1000)"
    terminal = start_in_terminal(write_program(tmp_path, "raw.py", text))
    terminal.until("raw")
    assert not terminal.is_restored
    terminal.process.send_signal(signal.SIGTERM)
    terminal.end()
    assert terminal.is_restored


@pytest.mark.smoke
def test_log_folder(run_ddplaunch, tmp_path):
    """The folder of a run holds the plan, the events, each rank's output and the failure."""
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "--log-dir", "logs", PROGRAMS / "fails.py", "exception", "1")
    assert done.returncode == 1
    (folder,) = (tmp_path / "logs").iterdir()
    assert f"log folder: logs/{folder.name}" in done.stderr
    assert {path.name for path in folder.iterdir()} == {
        "plan.json", "events.jsonl", "rank-0.log", "rank-1.log", "failure.json", "stacks.json",
        "rank-0.times", "rank-1.times",
    }  # fmt: skip
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["run_id"] == folder.name
    assert plan["master_port"] > 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    assert names[:2] == ["attempt_started", "zygote_ready"]
    assert names.count("rank_started") == 2
    assert names.count("rank_exited") == 2
    assert names[-1] == "job_ended"
    assert events[-1]["failure"]["first"]["rank"] == 1
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["first"]["rank"] == 1
    assert failure["first"]["exit_code"] == 1
    assert "ValueError: rank 1 fails" in failure["first"]["traceback"]
    assert failure["stopped"] == 1
