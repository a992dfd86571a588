"""Tests of the ssh client, with a program that plays ssh and its host."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import msgspec
import psutil
import pytest
from msgspec.structs import replace

import ddplaunch
from ddplaunch.features.ssh.remote_launcher import HostJob
from ddplaunch.features.ssh.ssh_command import REMOTE_STATEMENT
from ddplaunch.system.plan.launch_command import python_command
from tests.conftest import ddplaunch_command, is_alive, run_command, wait_until, write_program
from tests.features.doctor.findings import NO_REPLY
from tests.features.ssh.job import refusal
from tests.fork_server import CONSTANTS
from tests.scaled_timeouts import scaled_timeout

PLAYS = f"""\
#!{sys.executable}
import json, os, sys, time
seen = []

if "-G" in sys.argv:
    print(open("configuration").read())
    raise SystemExit
json.dump(sys.argv, open("typed", "w"))
say = lambda text: print(text, flush=True)
host = sys.argv[-2]
here = lambda: say("\\x1eddplaunch here {ddplaunch.__version__}") or [sys.stdin.readline(), sys.stdin.readline()][1]
nonce = lambda: json.loads(here())["nonce"]
facts = lambda text: say("\\x1eddplaunch " + nonce() + " " + text)

def ready(**changes):
    global mark
    versions = {{"python": "3", **changes.pop("versions", {{}})}}
    mark = "\\x1eddplaunch " + nonce()
    say(mark + " " + json.dumps({{"problems": [], "versions": versions, "machine": host, **changes}}))
    until("G")

def until(letter):
    while (byte := os.read(0, 1).decode("latin-1")) != letter:
        assert byte, "stdin has ended"
        seen.append(byte)

def end(code):
    print(f"{{mark}} {{code}}", file=sys.stderr, flush=True)
    sys.exit(code)

with open("part") as part:
    exec(part.read())
"""


@pytest.fixture
def play(run_in_fork, tmp_path):
    """Run a job on one host, whose ssh runs these lines of Python; return the job's exit code and complaint."""
    ssh = write_program(tmp_path, "bin/ssh", PLAYS)
    ssh.chmod(0o755)
    write_program(tmp_path, "train.py", "")
    write_program(
        tmp_path, "configuration", "hostname a\nstdinnull no\nsessiontype default\nforkafterauthentication no\n"
    )

    def run(part: str, **env: str) -> tuple[int, str]:
        write_program(tmp_path, "part", part)
        done = run_in_fork("run", "--hosts", "a:1", "train.py", env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **env})
        first, *rows = done.stderr.splitlines()
        assert first == refusal(1, 1)
        return done.returncode, "\n".join(rows)

    return run


def test_an_interrupt_does_not_wait_for_a_host_that_does_not_answer(play, start_ddplaunch, tmp_path):
    write_program(tmp_path, "part", "time.sleep(600)")
    job = start_ddplaunch("run", "--hosts", "a:1", "train.py", env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    wait_until((tmp_path / "typed").exists, "ssh")
    job.signal(signal.SIGINT)
    began = time.monotonic()
    assert job.wait() == 130
    assert time.monotonic() - began < scaled_timeout(2)
    assert job.stderr().strip() == ""
    job.assert_nothing_left()


EXITED = "the login shell exited before ddplaunch started"
PROBLEMS = [
    ("facts('no json'); time.sleep(600)", 2, NO_REPLY),
    ("facts('[' * 100000); time.sleep(600)", 2, NO_REPLY),
    ('facts(\'{"problems": [7], "versions": {"python": "3"}}\'); time.sleep(600)', 2, NO_REPLY),
    ("say('\\x1eddplaunch here 9.9.9'); time.sleep(600)", 2, f"ddplaunch 9.9.9 there, {ddplaunch.__version__} here"),
    (
        "say('\\x1eddplaunch here 9\\x1b[2J'); time.sleep(600)",
        2,
        f"ddplaunch 9\\x1b[2J there, {ddplaunch.__version__} here",
    ),
    ("sys.stderr.write('\\x1b]0;title\\x07 \\x9b1m\\r\\n'); sys.exit(255)", 69, r"\x1b]0;title\x07 \x9b1m"),
    ("sys.stderr.write('x' * 10_000_000); sys.exit(255)", 69, "x" * 299 + "…"),
    ("sys.stdout.write('y' * 1000); sys.exit(255)", 69, "y" * 299 + "…"),
    ("sys.exit(255)", 69, "ssh ended without a message"),
    ("sys.stderr.write('no route\\nkex_exchange_identification: x\\n'); sys.exit(255)", 69, "no route"),
    ("sys.stderr.write('kex_exchange_identification: x\\n'); sys.exit(255)", 69, "kex_exchange_identification: x"),
    ("sys.exit(3)", 2, f"{EXITED} (exit code 3): does one of its start files call exit?"),
]


@pytest.mark.parametrize(("part", "code", "complaint"), PROBLEMS, ids=range(len(PROBLEMS)))
def test_messages_of_a_host_that_cannot_run_the_job(play, part, code, complaint):
    assert play(part) == (code, f"  a  {complaint}")


def test_problems_of_a_host_are_short_and_plain(play):
    problems = json.dumps({"problems": ["\x1b[31mred\n" + "z" * 10_000, *"many" * 100], "versions": {"python": "3"}})
    code, complaint = play(f"facts({problems!r}); sys.stdin.read()", PYTHONPATH="")
    assert code == 2
    assert complaint.splitlines()[0].startswith(r"  a  red\nzzz")
    assert len(complaint.splitlines()) == 20
    assert all(len(line) < 310 and line.isprintable() for line in complaint.splitlines())


@pytest.mark.parametrize("known", [True, False])
def test_an_older_ssh_gets_no_setting_that_it_does_not_know(play, tmp_path, known):
    if not known:
        write_program(tmp_path, "configuration", "hostname a\n")
    play("sys.exit(255)")
    typed = json.loads((tmp_path / "typed").read_text())
    assert "-oClearAllForwardings=yes" in typed
    for setting in ("StdinNull=no", "ForkAfterAuthentication=no", "SessionType=default"):
        assert (f"-o{setting}" in typed) == known


def test_a_host_that_closes_the_connection_is_tried_again(play, tmp_path):
    """A closed connection is tried three more times; an answer that no retry changes is final."""
    short = {CONSTANTS: "features.ssh.fleet.RETRY_DELAY_S=0.01"}
    for complaint, times in (("Connection closed by 10.0.0.1 port 22", 4), ("a: Permission denied (publickey).", 1)):
        (tmp_path / "tries").unlink(missing_ok=True)
        part = f"open('tries', 'a').write('x'); sys.stderr.write({complaint!r}); sys.exit(255)"
        assert play(part, **short) == (69, f"  a  {complaint}")
        assert len((tmp_path / "tries").read_text()) == times


PRINTS = "ready(); say('to stdout'); print('ddplaunch: note\\n  more\\nof a rank', file=sys.stderr); end(0)"
JSON = 'ready(); print(\'{"source": "ddplaunch", "node_rank": "%s"}\' % host, file=sys.stderr); end(0)'
LOSES_C = """
ready()
if host == 'c':
    open('pid', 'w').write(str(os.getpid()))
    sys.exit(1)
while not os.path.exists('pid') or os.path.exists('/proc/' + open('pid').read()):
    time.sleep(0.01)
end(0)
"""
STOPPING = "ddplaunch: a has ended with exit code 3; stopping the others\n"

TOGETHER = [
    # What several launchers print is shown once; what ranks print, each time.
    ("", PRINTS, 0, "to stdout\n" * 2, "ddplaunch: note\n  more\nof a rank\nof a rank\n"),
    ("", JSON, 0, "", '{"source": "ddplaunch", '),
    ("", "ready(); end(3 if host == 'a' else until('T') or 143)", 3, "", STOPPING),
    ("", "ready(); sys.exit(1) if host == 'b' else until('T') or end(143)", 69, "", "b was lost: ssh ended without"),
    ("--spares 1", LOSES_C, 0, "", "c was lost: ssh ended without a message\n"),
    ("--spares 1", "ready(); sys.exit(1) if host == 'a' else until('T') or end(143)", 69, "", "a was lost: "),
    ("", "ready(versions={'torch': None if host == 'b' else '2'})", 2, "", "  b  torch is missing there, 2 on a\n"),
    ("", "ready(versions={'python': host})", 2, "", "  b  Python is b there, a on a\n"),
    ("--allow-mismatch", "ready(versions={'python': host}); end(0)", 0, "", ""),
    ("", "ready(machine='m')", 2, "", "  b  it is the same machine as a: name it once\n"),
    ("", "ready(machine=''); end(0)", 0, "", ""),
    ("", "sys.exit(255) if host == 'b' else ready()", 69, "", refusal(1, 2) + "\n  b  ssh ended without a message\n"),
]


@pytest.mark.parametrize(("words", "part", "code", "stdout", "stderr"), TOGETHER, ids=range(len(TOGETHER)))
def test_a_job_on_several_hosts(play, run_in_fork, tmp_path, words, part, code, stdout, stderr):
    write_program(tmp_path, "part", part)
    hosts = "a:1,b:1,c:1" if "--spares" in words else "a:1,b:1"
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", CONSTANTS: "features.ssh.fleet.OUTPUT_DRAIN_S=0.01"}
    done = run_in_fork("run", "--hosts", hosts, *words.split(), "train.py", env=env)
    assert (done.returncode, done.stdout) == (code, stdout), done.stderr
    assert done.stderr.count(stderr) == 1 if stderr else not done.stderr


def test_signals_reach_all_hosts_and_those_for_ranks_the_first(play, start_ddplaunch, tmp_path):
    """The launcher of node 0 forwards a signal for the ranks to the other nodes."""
    for_ranks = f"chr(0x80 + {signal.SIGUSR1:d})"
    waits = f"ready(); open(host, 'w').close(); until({for_ranks}) if host == 'a' else None; open(host + 2 * 'x', 'w')"
    part = f"{waits}; until('I'); open(host, 'w').write(str({for_ranks} in seen)); end(130)"
    write_program(tmp_path, "part", part)
    job = start_ddplaunch("run", "--hosts", "a:1,b:1", "train.py", env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    wait_until(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists(), "the start of both")
    job.signal(signal.SIGUSR1)
    wait_until((tmp_path / "axx").exists, "the signal")
    job.signal(signal.SIGINT)
    assert (job.wait(), (tmp_path / "b").read_text()) == (130, "False")


@pytest.mark.parametrize("variable", ["PYTHONPATH", "LD_LIBRARY_PATH"])
def test_a_line_break_on_the_way_to_a_shell(run_in_fork, play, tmp_path, variable):
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", variable: "/a\nb"}
    done = run_in_fork("run", "--hosts", "a:1", "train.py", env=env)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: '{variable}=/a\\nb' has a line break")
    assert not (tmp_path / "typed").exists()


def test_each_host_gets_its_part_of_the_job_whole(run_in_fork, play, tmp_path):
    """Folders and variables arrive unchanged; their contents become neither a command nor another line."""
    write_program(tmp_path, "part", "open(host, 'w').write(here()); sys.exit(255)")
    odd = "a\n$(touch ran)\x1b[2J\udcff'"
    words = "--hosts a:2,b --master-port 30000 --heartbeat-timeout 7 --log-dir logs --env X=1 --sidecar true --run-id r"
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "NCCL_DEBUG": odd}
    run_in_fork("run", *words.split(), "train.py", "--", "--lr", env=env)
    first, second = (json.loads((tmp_path / host).read_text()) for host in "ab")
    assert {**first, "argv": (), "ports": []} == {**second, "argv": ()}
    assert [" ".join(each["argv"]) for each in (first, second)] == [
        f"run --nnodes 2 --node-rank {rank} --master-addr a --master-port 30000 {nproc}--no-config --run-id r "
        f"--heartbeat-timeout 7 {sidecar}--log-dir logs -- train.py --lr"
        for rank, nproc, sidecar in ((0, "--nproc 2 ", "--sidecar true "), (1, "", ""))
    ]
    assert len(first.pop("nonce")) == len(first["environ"].pop("DDPLAUNCH_TOKEN")) == 32
    assert {**first, "argv": ()} == {
        "environ": {"NCCL_DEBUG": odd, "X": "1", "DDPLAUNCH_OVER_SSH": "1"}, "cwd": str(tmp_path), "target": "train.py",
        "module": False, "no_python": False, "log_dir": "logs", "address": "a", "ports": [30000, 30001], "argv": (),
        "preempt_signal": signal.SIGUSR2, "heartbeat": 7.0, "grace": 30.0, "code": None,
    }  # fmt: skip
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("limit", ["-S", ""])
def test_hosts_for_which_there_are_too_few_open_files(play, tmp_path, limit):
    """The limit of open files is raised where that is allowed; else the job is refused before anything starts."""
    write_program(tmp_path, "part", "sys.exit(255)")
    line = f"ulimit {limit} -n 60; exec {shlex.join(ddplaunch_command('run', '--hosts', 'a[1-8]:1', 'train.py'))}"
    done = run_command(["sh", "-c", line], tmp_path, {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    if limit:
        assert done.returncode == 69
        assert "8 of 8 hosts" in done.stderr
    else:
        assert done.returncode == 2
        assert done.stderr == (
            "Error: 8 hosts need 64 open files, and at most 60 are allowed (ulimit -Hn)\n"
            "  start fewer hosts, or ask for a higher limit\n"
        )
        assert not (tmp_path / "typed").exists()


def test_an_internal_error_on_a_host_is_one_line():
    done = run_command(python_command(sys.executable, REMOTE_STATEMENT), input="exec sh\n{nonsense\n")
    assert done.returncode == 70
    assert re.fullmatch("a bug in ddplaunch on this host: JSONDecodeError: .*\n", done.stderr)


JOB = HostJob(
    nonce="n", environ={"A": "caf\udce9"}, cwd="/caf\udce9", target="train.py", module=False, no_python=False,
    log_dir=None, address="n0", ports=(29500, 29501), argv=("run", "--", "train.py", "\udcff"), preempt_signal=12,
    heartbeat=15.0, grace=0.0,
)  # fmt: skip


def test_a_job_arrives_as_it_was_sent():
    """A job arrives unchanged, also with bytes that are not UTF-8."""
    assert HostJob.read(JOB.line()) == JOB


@pytest.mark.parametrize("wrong", [{"nonce": 1}, {"ports": (70000,)}, {"heartbeat": 0.0}, {"grace": -1.0}])
def test_a_job_has_values_that_make_sense(wrong):
    with pytest.raises(msgspec.ValidationError, match=f"Expected .* - at `\\$.{next(iter(wrong))}"):
        HostJob.read(replace(JOB, **wrong).line())


SOONER = (
    "from ddplaunch.features.ssh import remote_launcher as far; far.KILL_DELAY_S = 0.1; raise SystemExit(far.main())"
)


@contextmanager
def far_end(folder, script, *options, **changes):
    """A host's side of a job that runs a script of sh, after a line that a login shell left, and its first lines."""
    argv = ("run", "--nproc", "1", *options, "--no-python", "sh", str(write_program(folder, "s", script)))
    usual = {"environ": {}, "cwd": str(folder), "target": "sh", "no_python": True, "address": "", "ports": ()}
    job = replace(JOB, **{**usual, "argv": argv, "preempt_signal": None, "heartbeat": 600.0, **changes})
    pipe = subprocess.PIPE
    with subprocess.Popen(python_command(sys.executable, SOONER), stdin=pipe, stdout=pipe, stderr=pipe) as far:
        far.stdin.write(b"exec sh, of a login shell\n" + job.line() + b"..")
        far.stdin.flush()
        hello, facts = [far.stdout.readline() for _ in range(3)][1:]
        assert hello == f"\x1eddplaunch here {ddplaunch.__version__}\n".encode()
        yield far, json.loads(facts.removeprefix(b"\x1eddplaunch n "))["problems"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end of stdin", "no heartbeat", "SIGTERM", "killed launcher"])
def test_a_host_that_loses_its_connection_or_launcher_kills_what_does_not_stop(tmp_path, how):
    stubborn = "trap '' TERM\ntrap 'touch seen' USR1\necho $$ > pid\nwhile :; do sleep 0.1; done\n"
    heartbeat, code = 0.5 if how == "no heartbeat" else 600.0, 137 if how == "killed launcher" else 69
    with far_end(tmp_path, stubborn, "--grace", "600", heartbeat=heartbeat) as (far, problems):
        assert problems == []
        far.stdin.write(b"G")
        far.stdin.flush()
        if how != "no heartbeat":
            wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the rank")
        if how == "SIGTERM":
            far.send_signal(signal.SIGUSR1)  # is for a launcher, and ends no process
            far.stdin.write(bytes([0x80 + signal.SIGUSR1]))
            far.stdin.flush()
            wait_until(lambda: (tmp_path / "seen").exists() or far.poll() is not None, "a signal for the rank")
            assert far.poll() is None
            far.send_signal(signal.SIGTERM)
        elif how == "killed launcher":
            psutil.Process(far.pid).children()[0].kill()
        err = far.communicate()[1] if how == "end of stdin" else far.stderr.read()
        assert far.wait() in ((69, 143) if how == "no heartbeat" else (code,))  # the launcher may not have begun
        assert err.partition(b"\x1e")[2] == b"ddplaunch n 137\n" * (code == 137), "else the other end is gone"
    if (tmp_path / "pid").exists():
        assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(("cwd", "code"), [("/", 69), ("/none", 2)])
def test_a_host_whose_job_is_not_started(tmp_path, cwd, code):
    with far_end(tmp_path, "", cwd=cwd) as (far, problems):
        assert problems == ["/none: No such file or directory"] * (code == 2)
        assert (far.communicate(), far.wait()) == ((b"", b""), code)
