"""Tests of ranks' output on the screen: complete lines, progress bars, nothing lost, and slow readers."""

from __future__ import annotations

import collections
import json
import os
import pty
import re
import select
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.output import sink
from tests.conftest import PROGRAMS, clean_environment, ddplaunch_command, wait_until, write_program
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
    """As srun -u and mpirun make one, and write its output to a log."""
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


class Terminal:
    """The launcher in a terminal of its own."""

    def __init__(self, words, cwd, env=None, columns=100, executable=None):
        self.master, slave = pty.openpty()
        import fcntl
        import struct
        import termios

        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = clean_environment({"TERM": "xterm-256color", **(env or {})})
        self.process = subprocess.Popen(
            ddplaunch_command(*words),
            executable=executable,
            cwd=cwd,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def read_until(self, text: str | None, timeout: float = 60) -> str:
        """Read until ``text`` has been shown, or to the end where it is None."""
        deadline = time.monotonic() + scaled_timeout(timeout)
        while text is None or text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"waited for {text!r}, saw {self.shown!r}"
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # EIO: the last process that had it open has ended
                data = b""
            if not data:
                assert text is None, f"ended before {text!r}, having shown {self.shown!r}"
                break
            self.shown += data.decode(errors="replace")
        return self.shown

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> int:
        self.read_until(None)
        os.close(self.master)
        return self.process.wait(scaled_timeout(60))


def test_an_error_breaks_between_words(tmp_path):
    """A terminal would break it anywhere."""
    (tmp_path / "train.py").write_text("")
    terminal = Terminal(("run", "--nproc", "2", "--show", "4", "train.py"), tmp_path, columns=44)
    assert terminal.end() == 2
    plain = re.sub(r"\x1b\[\d*m", "", terminal.shown)
    assert plain == "Error: --show 4: the job has ranks 0 to 1\r\n  all, none, or ranks like 0\r\n"
    terminal = Terminal(("run", "--grow", "--nnodes", "2", "--node-rank", "0", "train.py"), tmp_path, columns=40)
    assert terminal.end() == 2
    plain = re.sub(r"\x1b\[\d*m", "", terminal.shown)
    assert plain.startswith("Error: --grow does not work with\r\n  --nnodes 2\r\n")


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


@pytest.mark.slow
def test_any_bytes_pass(tmp_path, printer):
    """Invalid UTF-8, null bytes, a last line without newline and a very long line reach the console and the file."""
    script = printer(
        """
        out.buffer.write(b"bytes \\xff\\xfe\\x00 end\\n")
        out.buffer.write(b"y" * 1_000_000 + b"\\n")
        out.buffer.write(b"no newline")
        """
    )
    done = subprocess.run(
        ddplaunch_command("run", *LIGHT, "--nproc", "2", "--show", "1", "--log-dir", "logs", script),
        cwd=tmp_path, env=clean_environment(), capture_output=True, timeout=scaled_timeout(120),
    )  # fmt: skip
    assert done.returncode == 0
    expected = b"bytes \xff\xfe\x00 end\n" + b"y" * 1_000_000 + b"\nno newline"
    assert done.stdout == b"[1] " + expected.replace(b"\n", b"\n[1] ") + b"\n"
    for rank in (0, 1):
        assert next(tmp_path.glob(f"logs/*/rank-{rank}.log")).read_bytes() == expected


@pytest.mark.parametrize(
    ("show", "seen"),
    [("all", {0, 1, 2}), pytest.param("0,2", {0, 2}, marks=pytest.mark.smoke), ("none", set())],
)
def test_show(run_ddplaunch, tmp_path, printer, show, seen):
    script = printer("print('out', rank); print('err', rank, file=sys.stderr)")
    done = run_ddplaunch("run", *LIGHT, "--nproc", "3", "--show", show, "--log-dir", "logs", script)
    assert {int(line.split()[-1]) for line in done.stdout.splitlines()} == seen
    assert {int(line.split()[-1]) for line in done.stderr.splitlines() if line.startswith("[")} == seen
    for rank in range(3):
        assert next(tmp_path.glob(f"logs/*/rank-{rank}.log")).read_text().split() == [
            "out", str(rank), "err", str(rank),
        ]  # fmt: skip


def test_a_failed_rank_that_is_not_shown_is_still_reported(run_ddplaunch, printer):
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "--show", "0", printer("if rank: raise ValueError('unseen')"))
    assert done.returncode == 1
    assert "rank 1 failed with ValueError: unseen" in done.stderr


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


def test_prefixes_are_coloured_in_a_terminal_only(tmp_path, printer):
    script = printer("print('hello from', rank)")
    terminal = Terminal(["run", *LIGHT, "--nproc", "2", script], tmp_path)
    assert terminal.end() == 0
    assert re.search(r"\x1b\[\d+m\[0\]\x1b\[0m hello from 0", terminal.shown)
    terminal = Terminal(["run", *LIGHT, "--nproc", "2", script], tmp_path, env={"TERM": "dumb"})
    assert terminal.end() == 0
    assert "[0] hello from 0" in terminal.shown  # as with NO_COLOR, which other tests here have


def test_lines_appear_immediately_in_a_terminal(tmp_path, printer):
    """A printed line is shown while the rank continues, without flush."""
    terminal = Terminal(["run", *LIGHT, "--nproc", "2", printer("print('early', rank); time.sleep(1000)")], tmp_path)
    terminal.read_until("early 0")
    terminal.read_until("early 1")
    terminal.type("\x03")
    terminal.process.send_signal(signal.SIGINT)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130


BAR = """
for i in range(101):
    sys.stderr.write(f"\\r{i:3d}% of rank {rank}")
    sys.stderr.flush()
sys.stderr.write("\\n")
print("done", rank)
"""


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


def test_a_bar_is_one_line_in_a_log(run_ddplaunch, tmp_path, printer):
    """A hundred redraws are one line at the end in a log, and all of them in the rank's own file."""
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "--log-dir", "logs", printer(BAR))
    assert sorted(line for line in done.stderr.splitlines() if "%" in line) == [
        "[0] 100% of rank 0",
        "[1] 100% of rank 1",
    ]
    assert next(tmp_path.glob("logs/*/rank-0.log")).read_bytes().count(b"\r") == 101


def test_a_bar_before_every_line_loses_none(run_ddplaunch, tmp_path, printer):
    """1,000 of them come in one read."""
    script = printer("out.write(''.join(f'\\r{i} %\\nloss {i}\\n' for i in range(1000)))")
    result = run_ddplaunch("run", "--nproc", "2", *LIGHT, script)
    assert (result.returncode, result.stderr) == (0, "")
    shown = result.stdout.splitlines()
    for rank in (0, 1):
        own = [line.removeprefix(f"[{rank}] ") for line in shown if line.startswith(f"[{rank}]")]
        assert own == [line for i in range(1000) for line in (f"{i} %", f"loss {i}")]


def test_a_bar_is_redrawn_in_place_in_a_terminal(tmp_path, printer):
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
    terminal = Terminal(["run", *LIGHT, "--nproc", "2", script], tmp_path, env={"NO_COLOR": "1"})
    assert terminal.end() == 0
    rows = _screen(terminal.shown)
    assert [row for row in rows if "%" in row] == ["[0] 100% of rank 0", "[1] 100% of rank 1"] or sorted(
        row for row in rows if "%" in row
    ) == ["[0] 100% of rank 0", "[1] 100% of rank 1"]
    assert sorted(row for row in rows if "step" in row) == sorted(
        f"[{rank}] step {i} of rank {rank}" for rank in range(2) for i in range(5)
    )


def _screen(shown: str) -> list[str]:
    """The rows that a terminal would hold after ``shown``: carriage returns, newlines and erase-to-end understood."""
    rows, column = [""], 0
    for token in re.split(r"(\r\n|\r|\n|\x1b\[K)", shown):
        if token in ("\n", "\r\n"):
            rows.append("")
            column = 0
        elif token == "\r":
            column = 0
        elif token == "\x1b[K":
            rows[-1] = rows[-1][:column]
        else:
            rows[-1] = rows[-1][:column] + token + rows[-1][column + len(token) :]
            column += len(token)
    return [row for row in rows if row]


def test_a_bar_wider_than_the_terminal_is_cut(tmp_path, printer):
    """A wrapped row cannot be redrawn."""
    terminal = Terminal(
        ["run", *LIGHT, "--nproc", "2", printer("sys.stderr.write('\\r' + 'w' * 300); time.sleep(0.2)")], tmp_path
    )
    assert terminal.end() == 0
    while_it_ran = terminal.shown.split("\x1b[K")[0]
    assert 50 < while_it_ran.count("w") < 100


def test_a_closed_reader_neither_hangs_nor_ends_the_job(tmp_path, printer):
    """`| head -1`: the job runs to its end, and its files are complete."""
    script = printer("for i in range(100_000): print('line', i)")
    words = " ".join(ddplaunch_command("run", *LIGHT, "--nproc", "2", "--log-dir", "logs", str(script)))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} | head -1"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=scaled_timeout(90),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    for rank in range(2):
        assert len(next(tmp_path.glob(f"logs/*/rank-{rank}.log")).read_bytes().splitlines()) == 100_000


@pytest.mark.slow
def test_a_stuck_reader_does_not_hang_the_job(tmp_path, printer):
    """stdout is not read: after a timeout the job continues, its files are complete, and the lost lines are counted."""
    assert sink.READER_TIMEOUT_S == 10
    script = printer("for i in range(200_000): print('line', i, 'x' * 60)\nopen(f'done{rank}', 'w')")
    reader, writer = os.pipe()
    process = subprocess.Popen(
        ddplaunch_command("run", *LIGHT, "--nproc", "2", "--log-dir", "logs", script),
        executable=launcher_with_constant(tmp_path, "core.output.sink.READER_TIMEOUT_S", 1.0),
        cwd=tmp_path,
        env=clean_environment(),
        stdout=writer,
    )
    os.close(writer)
    wait_until(lambda: (tmp_path / "done0").exists() and (tmp_path / "done1").exists(), "the ranks' end", 100)
    with os.fdopen(reader, "rb") as file:
        shown = file.read()
    assert process.wait(scaled_timeout(60)) == 0
    assert all(line.startswith(b"[") for line in shown.splitlines())
    for rank in range(2):
        assert len(next(tmp_path.glob(f"logs/*/rank-{rank}.log")).read_bytes().splitlines()) == 200_000


def test_a_slow_reader_loses_nothing(tmp_path, printer):
    """A reader that is slower than the ranks blocks them, as on any pipe."""
    script = printer("for i in range(40_000): print('line', i, 'x' * 200)")
    process = subprocess.Popen(
        ddplaunch_command("run", *LIGHT, "--nproc", "2", script),
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    lines = 0
    while data := process.stdout.read(1 << 18):
        lines += data.count(b"\n")
        time.sleep(0.02)  # the slowness under test
    assert process.wait(scaled_timeout(60)) == 0
    assert lines == 80_000


def test_a_full_disk_costs_the_log_and_not_the_job(tmp_path, printer, request):
    """The disk of --log-dir fills up: one note, everything still on the console, exit code 0."""
    if os.getuid() != 0:
        pytest.skip("needs root to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small file system here")
    request.addfinalizer(lambda: subprocess.run(["umount", small], check=True))
    script = printer("for i in range(20_000): print('line', i, 'x' * 50)")
    done = subprocess.run(
        ddplaunch_command("run", *LIGHT, "--nproc", "2", "--log-dir", small, script),
        cwd=tmp_path, env=clean_environment({"TMPDIR": str(small)}), capture_output=True, text=True,
        timeout=scaled_timeout(90),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 40_000
    assert "No space left on device" in done.stderr


def test_pdb_on_one_rank(tmp_path):
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
    terminal = Terminal(["run", *LIGHT, "--nproc", "2", "--stdin", "1", script], tmp_path, env={"NO_COLOR": "1"})
    terminal.read_until("(Pdb) ")
    terminal.type("p rank + 41\n")
    terminal.read_until("42")
    terminal.type("c\n")
    assert terminal.end() == 0
    assert "[0] rank 0 read ''" in terminal.shown


def test_a_debugger_without_a_terminal(run_ddplaunch, tmp_path):
    write_program(tmp_path, "debugged.py", "import os\nif os.environ['RANK'] == '1':\n    breakpoint()\n    print()\n")
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "debugged.py")
    lines = done.stderr[done.stderr.index("ddplaunch: ") :].splitlines()
    assert lines[0] == "ddplaunch: rank 1 failed with BdbQuit (exit code 1)"
    assert lines[1] == "  with --debug the rank waits at its breakpoint for `ddplaunch debug`"


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


def test_secondary_failures_are_one_line_each(run_ddplaunch, tmp_path):
    """In a terminal the report alone has the cause's traceback; the log folder and an explicit --show have all."""
    write_program(tmp_path, "train.py", FALLS)
    words = ("run", *LIGHT, "--nproc", "3", "--grace", "20", "--log-dir", "logs")
    later = launcher_with_constant(tmp_path, "core.output.screen.TRACEBACK_S", scaled_timeout(10))
    terminal = Terminal([*words, "train.py"], tmp_path, env={"NO_COLOR": "1"}, executable=later)
    assert terminal.end() == 1
    shown = terminal.shown.replace("\r\n", "\n")
    assert "[0] ConnectionError: … Connection closed by peer [127.0.0.1]:1 (full traceback: --show all)\n" in shown
    assert "[0] Traceback" not in shown
    assert shown.count('raise ValueError("the cause")') == 1
    assert '\n  Traceback (most recent call last):\n    File "' in shown
    assert "[2] Traceback" in shown, "what is no rank's end is whole"
    assert "[2] ConnectionError: [/src" in shown
    assert "[2] rank 2 goes on\n" in shown
    (log,) = (tmp_path / "logs").glob("*/rank-0.log")
    assert "in meet" in log.read_text()
    terminal = Terminal([*words, "--show", "all", "train.py"], tmp_path, env={"NO_COLOR": "1"})
    assert terminal.end() == 1
    assert "[0] Traceback" in terminal.shown
    assert terminal.shown.count('raise ValueError("the cause")') == 2
    assert "[0] Traceback" in run_ddplaunch(*words, "train.py").stderr, "nor in a file"


@pytest.mark.slow
def test_a_traceback_not_in_a_report_is_shown(tmp_path):
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
    words = ["run", *LIGHT, "--nproc", "3", "--max-restarts", "1", "--restart-on", "always", "--min-uptime", "0"]
    terminal = Terminal([*words, script], tmp_path, env={"NO_COLOR": "1"})
    assert terminal.end() == 1
    shown = terminal.shown
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


def test_the_terminal_settings_are_restored(tmp_path):
    """A rank that is killed while the terminal does not echo leaves it as the shell had it."""
    import termios

    script = write_program(
        tmp_path, "raw.py", "import tty, time; tty.setraw(0); print('raw', flush=True); time.sleep(1000)"
    )
    terminal = Terminal(["run", script], tmp_path)
    before = termios.tcgetattr(terminal.master)
    terminal.read_until("raw")
    assert termios.tcgetattr(terminal.master) != before
    terminal.process.send_signal(signal.SIGTERM)
    terminal.process.wait(scaled_timeout(60))
    assert termios.tcgetattr(terminal.master) == before
    os.close(terminal.master)


def test_stdin_reaches_a_single_rank(tmp_path):
    script = write_program(tmp_path, "reader.py", "import sys; print(sys.stdin.read().upper())")
    done = subprocess.run(
        ddplaunch_command("run", script),
        cwd=tmp_path,
        env=clean_environment(),
        input="typed",
        capture_output=True,
        text=True,
        timeout=scaled_timeout(90),
    )
    assert done.stdout == "TYPED\n"


@pytest.mark.smoke
def test_log_folder(run_ddplaunch, tmp_path):
    """The folder of a run holds the plan, the events, each rank's output and the failure."""
    done = run_ddplaunch("run", *LIGHT, "--nproc", "2", "--log-dir", "logs", PROGRAMS / "fails.py", "exception", "1")
    assert done.returncode == 1
    (folder,) = (tmp_path / "logs").iterdir()
    assert f"kept in logs/{folder.name}" in done.stderr
    assert {path.name for path in folder.iterdir()} == {
        "plan.json", "events.jsonl", "rank-0.log", "rank-1.log", "failure.json", "stacks.json",
        "rank-0.times", "rank-1.times",
    }  # fmt: skip
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["run_id"] == folder.name
    assert plan["master_port"] > 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    assert names[:2] == ["begun", "ready"]
    assert names.count("started") == 2
    assert names.count("exited") == 2
    assert names[-1] == "ended"
    assert events[-1]["verdict"]["first"]["rank"] == 1
    failure = json.loads((folder / "failure.json").read_text())
    assert failure["first"]["rank"] == 1
    assert failure["first"]["exit_code"] == 1
    assert "ValueError: rank 1 fails" in failure["first"]["traceback"]
    assert failure["stopped"] == 1


def test_a_reader_that_closes_while_output_is_buffered():
    """What waits is dropped at the next write; nothing of it may still be in use then."""
    read, write_end = os.pipe()
    loop = EventLoop()
    writes = sink.Sink(loop, write_end)
    writes.write(b"x" * (1 << 20))
    assert not writes.is_drained
    os.close(read)
    loop.run_once()
    assert writes.is_closed
    assert writes.is_drained
