"""Tests of usage errors: refused before anything starts, in at most three lines, with what to type instead."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.base import safe_files
from ddplaunch.base.errors import LaunchError, UsageError
from ddplaunch.system.clusters.host_spec import read_hostfile
from ddplaunch.system.processes.process_limits import check_proc
from tests.conftest import clean_environment, conflict, ddplaunch_command, write_program
from tests.fake_nvml import fake_nvml as fake_nvml


@pytest.fixture
def refused(run_in_fork, run_ddplaunch, tmp_path):
    """Run ``ddplaunch WORDS`` beside a few programs; return its stderr after checking its form."""
    touch = "open(__file__ + '.started', 'w').close()\n"
    write_program(tmp_path, "train.py", touch)
    main = "def main(rank: int, world_size: int, save_every: int, total_epochs: int, batch_size: int): pass\n"
    write_program(tmp_path, "fn.py", touch + main)
    (tmp_path / "file").touch()

    def run(line: str, *, real: bool = False, **options: object) -> str:
        done = (run_ddplaunch if real else run_in_fork)(*shlex.split(line), **options)
        assert done.returncode == 2, done
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) <= 3
        assert "Traceback" not in done.stderr
        assert not list(tmp_path.rglob("*.started")), "the program ran"
        return done.stderr

    return run


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run", ("the target is missing", "ddplaunch run train.py")),
        ("run --nproc train.py", ("the target is missing; train.py was taken for the value of --nproc",)),
        ("submit train.py x --token s", ("ddplaunch's:   set DDPLAUNCH_TOKEN", "the program's: ddplaunch submit")),
        ("submit --mem=3 train.py 'ddplaunch run' --mem 4", ("submit --mem=3 --mem 4 train.py 'ddplaunch run'",)),
        ("run --hosts a,b --master-port 65535 train.py", ("--master-port 65535 leaves no port after it",)),
        ("run --nproc 0 train.py", ("--nproc 0: --nproc must be at least 1", "--nproc 1")),
        ("run --master-port 70000 train.py", ("--master-port 70000: expected a port from 1 to 65535",)),
        (
            'run --sidecar "sh -c \'x" train.py',
            ("--sidecar sh -c 'x: no closing quotation", "quotes must come in pairs"),
        ),
        ("run --sidecar 'nosuch -x' train.py", ("--sidecar nosuch -x: program nosuch not found", "sh -c '…'")),
        ("run --sidecar ./file train.py", ("program ./file not found", "name one on PATH")),
        ("run --notify 'nosuch -x' train.py", ("--notify nosuch -x: program nosuch not found", "sh -c '…'")),
        ("run --tensorboard /dev/null train.py", ("--tensorboard /dev/null is a file, not a folder",)),
        ("run --tensorboard file train.py", ("--tensorboard file is a file", "name its folder")),
        (
            "run python -u train.py --lr 1",
            ("python is not a script", "type: ddplaunch run train.py --lr 1"),
        ),
        ("run --nproc 2 python3 -m pkg.mod", ("python3 is not a script", "ddplaunch run --nproc 2 -m pkg.mod")),
        (
            "run /usr/bin/python3.11 train.py --nproc 2",
            ("/usr/bin/python3.11 is not a script", "type: ddplaunch run train.py --nproc 2"),
        ),
        ("run --token ' ' train.py", ("--token is empty", "give a secret")),
        ("run --master-addr no.such.host.invalid train.py", ("--master-addr no.such.host.invalid",)),
        ("run --json train.py", ("--json works only with --dry-run", "--dry-run")),
        ("run --nproc 2 --show 9 train.py", ("--show 9: the job has ranks 0 to 1", "all, none")),
        ("run --show x train.py", ("--show x: expected all, none, last, ranks like 0,3", "stderr of rank 0")),
        ("run --stdin 9 train.py", ("--stdin 9: this node has rank 0 only", "--stdin 0")),
        (
            "run --grace -1 train.py",
            ("--grace -1: expected a time from 0 up to a week, like 2.5 (seconds), 10m",),
        ),
        *((f"run --nice {text} train.py", (f"--nice {text}: expected a number from 0",)) for text in ("-1", "20")),
        ("run --timeout 0 train.py", ("--timeout 0: expected a time from 1 second up to a year, like 90",)),
        ("run --stall-timeout 10min train.py", ("--stall-timeout 10min: expected a time", "10m")),
        ("run --on-stall stop train.py", ("--on-stall stop works only with --stall-timeout", "--stall-timeout 10m")),
        (
            "run --stall-timeout 10m --on-stall restart train.py",
            ("--on-stall restart works only with --max-restarts", "add --max-restarts 3"),
        ),
        ("run --stall-timeout 9 --no-inspect train.py", (conflict("--stall-timeout", "--no-inspect"),)),
        ("run --stall-timeout 9 --no-python sh", (conflict("--stall-timeout", "--no-python"),)),
        (
            "run --stall-timeout 9 --control none --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 train.py",
            (conflict("--stall-timeout", "--control none"),),
        ),
        ("run --stall-timeout 9 --no-inspect --hosts n1:2 train.py", ("does not work with --no-inspect",)),
        ("run --start fork train.py", ("--start fork: expected auto, zygote or exec",)),
        ("run --start zygot train.py", ("did you mean --start zygote?",)),
        ("-v", ("no such option: -v", "did you mean --version?")),
        ("run --start exec --preload json train.py", (conflict("--preload", "--start exec"), "one of them out")),
        ("run --preload json --no-python /bin/true", ("only Python can be forked",)),
        ("run --preload no_such_module train.py", ("--preload no_such_module: No module named 'no_such_module'",)),
        ("run --log-dir /proc/x train.py", ("--log-dir /proc/x:", "use a folder with write permission")),
        ("run --log-dir file/x train.py", ("--log-dir file/x: Not a directory",)),
        ("run --nnodes 2 train.py", ("--node-rank is missing: which of the 2 nodes is this?", "1 on the other")),
        ("run --nnodes 2 --node-rank 1 train.py", ("--master-addr is missing: where is node 0", "hostname -I")),
        ("run --nnodes 2 --node-rank 0 train.py", ("--master-addr is missing: where do the other nodes reach",)),
        (
            "run --nnodes 2 --node-rank 0 --master-addr 192.0.2.7 train.py",
            ("--master-addr 192.0.2.7 is not an address", "--node-rank"),
        ),
        *(
            (f"run {nodes} --master-addr {'a' * 64}.b train.py", (f"--master-addr {'a' * 64}.b", "host name"))
            for nodes in ("--nnodes 2 --node-rank 0", "--nnodes 2 --node-rank 1", "--nnodes 2 --node-rank auto", "")
        ),
        (f"run --local-addr {'a' * 64} --nnodes 2 train.py", ("is not an address",)),
        ("run --spares 1 train.py", ("--spares 1 works only with several nodes: a spare cannot replace node 0",)),
        (
            "run --nnodes 2 --spares 1 --control none --node-rank 0 train.py",
            (f"{conflict('--spares 1', '--control none')}: nodes do not notice lost nodes", "leave one"),
        ),
        (
            "run --nnodes 2 --spares 1 --node-rank 0 --nproc 8,4 train.py",
            (f"{conflict('--nproc 8,4', '--spares')}: ", "one number for all nodes"),
        ),
        (
            "run --nnodes 2 --spares 1 --node-rank 3 train.py",
            ("--node-rank 3 is out of range: 3 nodes are numbered 0 to 2",),
        ),
        (
            "run --dry-run --nnodes 2 --spares 1 --node-rank 2 train.py",
            ("--node-rank 2 is a spare at first: it has no ranks yet", "--node-rank 0 to 1"),
        ),
        ("run --nnodes 4:2 train.py", ("--nnodes 4:2: 4 is more than 2", "--nnodes 2:4")),
        ("run --nnodes 0:4 train.py", ("--nnodes 0:4: a job has at least one node", "--nnodes 1:4")),
        ("run --nnodes 2 --grow train.py", (conflict("--grow", "--nnodes 2"), "--nnodes 2:3")),
        ("run --nnodes 2:4 --control none train.py", (conflict("--nnodes 2:4", "--control none"),)),
        (
            "run --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29511 --nproc 1 --max-restarts 3 "
            "--control none train.py",
            (f"{conflict('--max-restarts 3', '--control none')}: each node would restart alone",),
        ),
        (
            "run --nnodes 2 --node-rank auto --control none --nproc 1 --master-addr n0 --master-port 4000 train.py",
            (conflict("--node-rank auto", "--control none"),),
        ),
        (
            "run --nnodes 2 --node-rank auto --nproc 2,1 --master-addr 127.0.0.1 train.py",
            ("--nproc 2,1 lists ranks by node rank, which is unknown",),
        ),
        ("run --nnodes 2 --node-rank auto train.py", ("--master-addr is missing",)),
        ("run --nproc 2 --merge --prefix none train.py", (conflict("--merge", "--prefix none"),)),
        (
            "run --nproc 2 --merge --prefix '{host} {rank}' train.py",
            (conflict("--merge", "--prefix {host} {rank}"),),
        ),
        *((f"{name} ''", ("name of the run",)) for name in ("logs", "report", "wait", "stop", "clean")),
        ("run --help=yes train.py", ("Option '--help' does not take",)),
        (
            "submit --nodes 2 --restart-on never train.py",
            ("--restart-on never: expected any, transient, always or exit",),
        ),
        ("run --restart-on alw train.py", ("--restart-on alw: expected", "did you mean always?")),
        ("run --restart-on 75, train.py", ("--restart-on 75,: expected", "--restart-on 75,137,transient")),
        ("run --restart-on 0,75 train.py", ("a rank that exits with code 0 has not failed",)),
        ("run --restart-on 256 train.py", ("--restart-on 256: 256 is no exit code: they are 1 to 255",)),
        ("run --restart-on=-9 train.py", ("-9 is no exit code", "137 is the exit code of SIGKILL")),
        ("run --restart-on 75,75 train.py", ("75 is listed twice",)),
        ("run --restart-on any,75 train.py", ("any includes 75", "--restart-on any, or --restart-on 75")),
        ("submit --rdzv_endpoint n0:29500 train.py", ("node 0 is the first node of the allocation",)),
        ("submit --nnodes 2 train.py", ("use --nodes N",)),
        ("submit --node_rank 1 train.py", ("numbers the nodes",)),
        ("submit --standalone train.py", ("use --nodes N",)),
        ("submit -w n1 train.py", ("did you mean --nodelist?",)),
        ("run --heartbeat-timeout 1.9 train.py", ("--heartbeat-timeout 1.9: expected 2 seconds or more",)),
        ("run --join-timeout -1 train.py", ("--join-timeout -1: expected a time",)),
        ("run --control-port 0 train.py", ("--control-port 0: expected a port",)),
        ("run --run-id a/b train.py", ("--run-id a/b: expected letters, digits, dots, dashes and underscores",)),
        (
            "run --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 65535 train.py",
            ("--master-port 65535 leaves no port", "--control-port"),
        ),
        (
            "run --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29500 --control-port 29500 train.py",
            ("--control-port 29500 is the master port",),
        ),
        (
            "run --nnodes 2 --nproc 1 --node-rank 0 --master-addr a --control none train.py",
            ("--control none on 2 nodes needs --master-port",),
        ),
        ("run fn.py:main", ("fn.py:main needs --save_every, --total_epochs and --batch_size", "main(rank: int, w")),
        ("train.py --nproc 4", ('unknown command "train.py"', "ddplaunch run train.py --nproc 4")),
        ("--nproc 4 train.py", ("--nproc must follow a command", "ddplaunch run --nproc 4 train.py")),
    ],
)
def test_refused(refused, line, expected):
    error = refused(line)
    assert error.startswith("Error: ")
    for part in expected:
        assert part in error


MANY = "9" * 5000
NO_NUMBERS = ("1_0", "٣", "+1", " 1", "1.5", "0x1", MANY)
"""Numbers that Python's int() takes and that a user does not mean."""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *((f"run --nproc '{text}' train.py", "expected a number, a list") for text in NO_NUMBERS),
        *((f"run --nnodes '{text}' train.py", ": expected a number like 2") for text in NO_NUMBERS),
        *((f"run --nnodes 2 --node-rank '{text}' train.py", ": expected a whole number") for text in NO_NUMBERS),
        *((f"run --master-port '{text}' train.py", ": expected a port") for text in NO_NUMBERS),
        *((f"run --max-restarts '{text}' train.py", ": expected a number from 0 up") for text in NO_NUMBERS),
        *((f"run --grace '{text}' train.py", ": expected a time") for text in ("1_0", "٣", "+1", "nan", MANY)),
        *((f"run --show '{text}' train.py", ": expected all, none, last, ranks") for text in ("1_0", "٣", "+1", MANY)),
        *((f"run --nproc-per-node 1 -r '{text}:1' train.py", ": expected numbers of streams") for text in ("٣", MANY)),
        (f"run --init-method tcp://a:{MANY} train.py", "unknown --init-method"),
        ("run --nproc 4097 train.py", "a node runs at most 4,096 processes"),
        ("run --nnodes 1000000000 --node-rank 0 train.py", "a job has at most 65,536 nodes"),
        ("run --nnodes 1:1000000000000000000000 train.py", ": expected a number like 2"),
        ("run --nnodes 65536 --nproc 8 train.py", "at most 262,144 ranks, not 524,288"),
        *((f"submit --nodes '{text}' train.py", "expected a number") for text in ("1٣", "1_0", "+1", MANY)),
        (f"submit --time {MANY} train.py", "--time 9"),
        (f"manifest --container-image i --gpus-per-node {MANY} train.py", "expected a number"),
        (f"manifest --container-image i --mem {MANY} train.py", "expected a size"),
        ("run --interface nosuch0 train.py", "--interface nosuch0: this machine has no such interface"),
        ("run --preload , train.py", "--preload ,: '' is not the name of a module"),
        ("run --preload train.py train.py", "--preload train.py: 'train.py'"),
        ("run --preempt-forward none train.py", "--preempt-forward none: expected one of USR1"),
        ("run --backend :gloo train.py", "--backend :gloo: a device or a backend is empty"),
        ("run --backend gloo, train.py", "--backend gloo,: a device or a backend is empty"),
        ("manifest --namespace A --container-image i train.py", "--namespace A: expected small letters"),
        ("run --backend gloo,gloo train.py", "--backend gloo,gloo needs a device for each backend"),
        ("run --backend cpu:gloo,cpu:gloo train.py", "a device for each backend"),
        ("run two.py:main --layers 1 --layers 2 --layers 3", "cannot take --layers: it has 2 values, and 3 are given"),
        (f"run two.py:main --layers 1 --layers {MANY}", "is not a valid integer"),
        (f"run two.py:main --guess {MANY} --layers 1", "it has 2 values, and 1 are given"),
    ],
    ids=lambda value: value[:60],
)  # fmt: skip
def test_invalid_and_huge_values_are_refused(refused, tmp_path, line, expected):
    write_program(tmp_path, "two.py", "def main(layers: tuple[int, int], guess=None): pass\n")
    error = refused(line)
    assert expected in error
    assert len(error) < 1200, "values are cut"


def test_a_fifo_without_a_writer_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_files, "FIFO_OPEN_TIMEOUT_S", 0.05)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="fifo: no process writes to this FIFO"):
        read_hostfile(str(tmp_path / "fifo"))


def test_control_characters_in_values_are_escaped(refused):
    error = refused("run 'a\033[2J\nddplaunch: kept in /\r\u202e.py'")
    assert error.splitlines()[0] == r"Error: no such script: a\x1b[2J\nddplaunch: kept in /\r\u202e.py"
    assert (
        refused(f"run --role x {'y' * 10_000}.py").splitlines()[0]
        == f"Error: cannot read {'y' * 100}…: File name too long"
    )


BUG = """
import sys
import ddplaunch.system.devices

def broken():
    raise ValueError("of ours\\n\\033[2J\\udcff")

ddplaunch.system.devices.read_hardware = broken
sys.argv[0] = "ddplaunch"
from ddplaunch.cli import main
main()
"""


@pytest.mark.parametrize("folder", ["kept", "none"])
def test_a_bug_in_ddplaunch_is_reported_with_its_details_file(tmp_path, folder):
    write_program(tmp_path, "train.py", "")
    (tmp_path / "kept").mkdir()
    environ = {**clean_environment(), "TMPDIR": str(tmp_path / folder), "TEMP": "/proc/nowhere", "TMP": "/proc/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", BUG, "run", "--token", "secret", "train.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (70, "")
    first, second = done.stderr.splitlines()
    assert first == r"Error: bug in ddplaunch: ValueError: of ours\n\x1b[2J\udcff"
    found = re.fullmatch(r"  the details are in (\S+)", second)
    assert found is not None, second
    details = Path(found[1]).read_text()
    assert "in broken" in details
    assert "secret" not in details
    Path(found[1]).unlink()


def test_without_tensorboard(refused, tmp_path):
    """A folder with the name of a package does not count as the package."""
    write_program(tmp_path, "site/sitecustomize.py", "import sys\nsys.modules['tensorboard'] = None\n")
    (tmp_path / "tensorboard").mkdir()
    output = refused("run --tensorboard tensorboard train.py", real=True, env={"PYTHONPATH": str(tmp_path / "site")})
    assert "the package tensorboard is not installed for " in output
    assert "pip install tensorboard" in output


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root may write to")
def test_init_method_in_a_place_that_cannot_be_written(refused):
    """A user without write permission is refused by the folder's rights; root, whom they do not stop, by the trial."""
    error = refused("run --init-method file:///proc/store train.py")
    root, others = "cannot be written: ", ": /proc/store is not writable"
    assert re.search(f"--init-method file:///proc/store ?({root}|{others})", error)


def test_a_port_that_is_taken_names_its_holder(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused(f"run --master-port {port} train.py")
    assert f"--master-port {port} is in use by " in error
    assert f"(pid {os.getpid()}, " in error


@pytest.mark.ci
def test_a_backend_that_this_torch_has_not(refused):
    for words in ("--nproc 3", "--nproc 1"):  # from the zygote, and from a fresh interpreter
        error = refused(f"run {words} --backend mpi train.py", real=True)
        assert "--backend mpi is not available: this torch" in error
        assert "gloo" in error


@pytest.fixture
def unprivileged():
    """The words before a command that take its privileges away, as root may read anything."""
    if os.geteuid() != 0:
        return []
    if not shutil.which("setpriv"):
        pytest.skip("this is root, and there is no setpriv")
    words = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    probe = subprocess.run([*words, *ddplaunch_command("--version")], cwd="/", capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this is root, and the interpreter is out of reach of any other user")
    return words


@pytest.mark.parametrize("locked", ["secret.py", "."])
def test_a_script_that_may_not_be_read(unprivileged, locked):
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is below a folder that is closed to others
        script = write_program(Path(folder), "secret.py", "")
        Path(folder).chmod(0o755)
        (Path(folder) / locked).chmod(0)
        words = [*unprivileged, *ddplaunch_command("run", script)]
        done = subprocess.run(words, cwd="/", capture_output=True, text=True, env=clean_environment(), check=False)
        Path(folder).chmod(0o755)
    assert done.returncode == 2
    assert done.stderr == f"Error: cannot read {script}: Permission denied\n"


def test_windows_is_not_supported():
    code = "import sys, ddplaunch.cli; sys.platform = 'win32'; ddplaunch.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "ddplaunch does not support Windows; it runs in WSL 2.\n"


@pytest.mark.parametrize("line", ["run x.py", "doctor", "doctor bisect --hosts a,b -- true"])
def test_a_directory_that_is_gone(tmp_path, line):
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    start = [sys.executable, "-c", "import ddplaunch.cli as cli; cli.main()"]
    words = ["sh", "-c", script, "sh", *start, *line.split()]
    environment = clean_environment({"PYTHONPATH": str(Path(ddplaunch.__file__).parent.parent)})
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: the current folder does not exist any more")


def test_file_names_that_are_not_utf_8(run_ddplaunch, tmp_path):
    done = run_ddplaunch("run", "no\udcff.py")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: no such script: no")
    write_program(tmp_path, "train.py", "")
    assert "\\udcff" in run_ddplaunch("run", "--dry-run", "train.py", "\udcff").stdout


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_terminals_with_other_encodings(run_ddplaunch, tmp_path, encoding):
    write_program(tmp_path, "träin.py", "")
    done = run_ddplaunch("run", "--dry-run", "träin.py", "…", env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"})
    assert done.returncode == 0
    assert "1 rank on 1 node" in done.stdout


def test_too_little_memory_for_the_launcher(tmp_path):
    write_program(tmp_path, "t.py", "")
    words = shlex.join(map(str, ddplaunch_command("run", "t.py")))
    done = subprocess.run(
        ["sh", "-c", f"ulimit -v 30000; exec {words}"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 71
    assert done.stderr == (
        "Error: out of memory\n  the limit on the memory of a process is 30000 KiB (ulimit -v): raise it\n"
    )


def test_without_proc(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "exists", lambda path: False)
        with pytest.raises(LaunchError, match="/proc is not mounted"):
            check_proc()
    monkeypatch.setattr(os, "readlink", lambda path: "4711")
    with pytest.raises(LaunchError, match=r"this process is \d+, but 4711 there"):
        check_proc()


def test_a_file_on_pythonpath_with_the_name_of_a_module_of_python(run_ddplaunch, tmp_path):
    path = write_program(tmp_path, "mine/json.py", "MINE = 1\n")
    write_program(tmp_path, "train.py", "")
    done = run_ddplaunch("run", "--nproc", "2", "train.py", env={"PYTHONPATH": str(tmp_path / "mine")})
    assert done.returncode == 2
    assert f"{path} has the name of a module of Python, which ddplaunch and torch import: AttributeError" in done.stderr
    assert "bug in ddplaunch" not in done.stderr
