"""Tests of torchrun's command line: each row of docs/torchrun.md is true, and no option of torch is missing."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.cli.run_command import run
from ddplaunch.cli.target_command import spellings
from ddplaunch.cli.torchrun.torchrun_options import FLAGS, VALUES
from ddplaunch.cli.torchrun.translator import translate
from tests.conftest import assert_refused, clean_environment, conflict, write_program
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.start_modes import EXEC, FORKED, LIGHT

PAGE = Path(__file__).parent.parent.parent / "docs" / "torchrun.md"


class Row(NamedTuple):
    """A command line in the page's table; ``refused`` is what the error advises to type instead."""

    variables: dict[str, str]
    theirs: list[str]
    ours: list[str]
    refused: str | None


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 3 or cells[0] in ("torchrun", "---"):
            continue
        assert re.fullmatch("`[^`]+`(, `[^`]+`)*", cells[0]), line
        for words in map(shlex.split, re.findall("`([^`]+)`", cells[0])):
            variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
            theirs = [word for word in words if not re.match(r"[A-Z_]+=", word)]
            refused = re.fullmatch(r"refused: `([^`]+)`", cells[1])
            if cells[1] == "the same":
                ours = theirs
            elif cells[1] == "nothing" or refused:
                ours = []
            else:
                ours = shlex.split(re.fullmatch(r"`([^`]+)`", cells[1])[1])
            found.append(Row(variables, theirs, ours, refused and refused[1]))
    return found


ROWS = [pytest.param(row, id=" ".join([*row.variables, *row.theirs]) or "") for row in rows()]
OPTIONS = spellings(run.params)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_page_shows_the_translated_options(row):
    """The words in the other column can be typed. An option without effect is reported, unless it has its default."""
    if row.refused:
        with pytest.raises(UsageError) as refusal:
            translate([*row.theirs, "train.py"], OPTIONS, row.variables)
        assert row.refused in f"{refusal.value.hint}"
        return
    assert translate([*row.theirs, "train.py"], OPTIONS, row.variables).argv == [*row.ours, "train.py"]
    assert run.make_context("run", [*row.ours, "train.py"]), "each value can be read"
    underscored = [f"--{word[2:].replace('-', '_')}" if word.startswith("--") else word for word in row.theirs]
    assert translate([*underscored, "train.py"], OPTIONS, row.variables).argv == [*row.ours, "train.py"]


# ------------------------------------------------------------------------------------------- torch's own parser

PARSER = """
import json
from torch.distributed import launch
from torch.distributed.argparse_util import check_env, env
parsers = []
make = launch.get_args_parser
launch.get_args_parser = lambda: parsers.append(make()) or parsers[-1]
launch.parse_args(["train.py"])
print(json.dumps([
    [action.option_strings, action.nargs == 0, isinstance(action, (env, check_env)), action.dest]
    for action in parsers[0]._actions if action.option_strings
]))
"""


@pytest.fixture(scope="module")
def torch_options(torchrun, tmp_path_factory):
    """Of each option of the installed torch.distributed.launch: its names, is it a flag, has it a variable, which."""
    done = torchrun("-c", PARSER, cwd=tmp_path_factory.mktemp("parser"))
    return [option for option in json.loads(done.stdout) if "--help" not in option[0]]


@pytest.mark.slow
def test_every_option_of_torch_is_known_and_documented(torch_options):
    """A new option of torch fails here until the page has a row for it."""
    documented = {word for row in rows() for word in row.theirs if word.startswith("--")}
    assert len(torch_options) > 25
    for names, flag, has_variable, dest in torch_options:
        name = max((each.replace("_", "-") for each in names), key=len)
        assert name in (FLAGS if flag else VALUES), names
        assert name in documented, f"{name} has no row in docs/torchrun.md"
        for spelling in names:
            words = [spelling] if flag else [spelling, ""]
            assert _accepts_or_says_empty([*words, "train.py"], spelling), spelling
        variable = f"PET_{dest.upper()}"
        value = "1" if flag else {"--nnodes": "3:4"}.get(name, "99:")  # nonsense for most, and seen to be
        is_read = _is_read(variable, value)
        assert is_read == has_variable, f"{variable}={value}"


def _accepts_or_says_empty(words: list[str], spelling: str) -> bool:
    try:
        return translate(words, OPTIONS, {}).argv[-1] == "train.py"
    except UsageError as error:
        return error.message == f"{spelling} has an empty value"


def _is_read(variable: str, value: str) -> bool:
    try:
        translation = translate(["train.py"], OPTIONS, {variable: value})
    except UsageError:
        return True
    return any(variable in note for note in translation.notes)


# -------------------------------------------------------------------------------------------------- what goes before


def words(line: str, **environ: str) -> str:
    return shlex.join(translate(shlex.split(line), OPTIONS, environ).argv)


@pytest.mark.parametrize(
    ("line", "environ", "read"),
    [
        ("-r3 train.py", {}, "--log-dir TMP --show none train.py"),
        ("--show 0 --standalone train.py --tee 3", {}, "--nnodes 1 --show 0 train.py --tee 3"),
        ("--nproc-per-node 2 train.py --nproc-per-node 3", {}, "--nproc 2 train.py --nproc-per-node 3"),
        ("--nproc-per-node 2 train.py", {"PET_NPROC_PER_NODE": "4"}, "--nproc 2 train.py"),
        ("--nproc 2 train.py", {"PET_NPROC_PER_NODE": "4"}, "--nproc 2 train.py"),
        ("train.py", {"PET_NPROC_PER_NODE": ""}, "train.py"),
        ("train.py", {"PET_NPROC_PER_NODE": "4", "TORCHELASTIC_RUN_ID": "x"}, "train.py"),
        ("train.py", {"PET_NPROC_PER_NODE": "4", "DDPLAUNCH_DEVICE": "cpu"}, "train.py"),
        ("train.py", {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MAX_RESTARTS": "3"}, "--max-restarts 3 train.py"),
        ("--nnodes 3 train.py", {"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "--nnodes 3 --node-rank 1 train.py"),
        ("--hosts a:2,b:2 train.py", {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, "--hosts a:2,b:2 train.py"),
        ("train.py", {"PET_STANDALONE": "0", "PET_NO_PYTHON": "0"}, "train.py"),
        ("train.py", {"PET_SHUTDOWN_TIMEOUT": "7", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8"}, "--grace 7 train.py"),
        ("--standalone --rdzv-backend etcd --rdzv-id x train.py", {}, "--nnodes 1 --run-id x train.py"),
        ("--rdzv-id 'exp 1: a/b' train.py", {}, "--run-id exp-1-a-b train.py"),
        ("--rdzv-id :: train.py", {}, "--run-id job train.py"),
        ("--master-addr [fd00::1] --node_rank 1 --nnodes 2 train.py", {},
         "--nnodes 2 --node-rank 1 --master-addr '[fd00::1]' train.py"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint [fd00::1]:4000 train.py", {},
         "--nnodes 2 --master-addr fd00::1 --master-port 4000 --node-rank auto train.py"),
        ("-r 1 -t 0:1 --log-dir d train.py", {}, "--log-dir d --show all/err,local:0 train.py"),
        ("-r 3 --local-ranks-filter 1,0 -t 0:2 --log-dir d train.py", {},
         "--log-dir d --show local:0/err,1/none train.py"),
    ],
)  # fmt: skip
def test_precedence_of_options_and_variables(line, environ, read, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/t")
    assert re.sub(rf"/t/ddplaunch-logs-{os.getuid()}-[0-9a-f]{{16}}", "TMP", words(line, **environ)) == read


@pytest.mark.parametrize(
    ("line", "environ", "message"),
    [
        ("--rdzv-endpint x train.py", {}, "did you mean torchrun's --rdzv-endpoint?"),
        ("--nproc-per-node 2 --nproc 3 train.py", {}, "--nproc-per-node and --nproc contradict each other"),
        ("--standalone --nnodes 2 train.py", {}, conflict("--standalone", "--nnodes 2")),
        ("--nnodes 2 --rdzv-backend c10d train.py", {}, "--rdzv-backend c10d on 2 nodes needs --rdzv-endpoint"),
        ("--rdzv-endpoint :29500 train.py", {}, "--rdzv-endpoint :29500: expected HOST:PORT"),
        ("--rdzv-conf join_timeout train.py", {}, "--rdzv-conf join_timeout: expected KEY=VALUE"),
        ("--redirects 4 train.py", {}, "--redirects 4: expected numbers of streams"),
        ("-t 0:1,x train.py", {}, "-t 0:1,x: expected numbers of streams"),
        ("--local_ranks_filter a train.py", {}, "--local_ranks_filter a: expected a list of ranks"),
        ("--local-addr 192.0.2.9 train.py", {}, "--local-addr 192.0.2.9 is not an address"),
        ("--tee", {}, "--tee needs a value"),
        ("--nnodes= --node_rank= --master_addr= --nproc_per_node=1 train.py", {}, "--nnodes has an empty value"),
        ("--nproc_per_node= train.py", {}, "--nproc_per_node has an empty value"),
        ("--nnodes 2 --node_rank 0 --master_addr '' --nproc_per_node 1 train.py", {}, "--master_addr has an empty"),
        ("--node_rank= --nproc_per_node=1 train.py", {"PET_NODE_RANK": "1"}, "--node_rank has an empty value"),
        ("--rdzv-id --standalone train.py", {}, "--rdzv-id needs a value"),
        ("train.py", {"PET_STANDALONE": "yes"}, "PET_STANDALONE=yes: expected 0 or 1"),
        ("train.py", {"PET_LOCAL_RANKS_FILTER": "a"}, "PET_LOCAL_RANKS_FILTER a: expected a list"),
    ],
)
def test_invalid_torchrun_options_are_refused(line, environ, message, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "print('started')")
    assert_refused(run_in_fork("run", *shlex.split(line), env=environ), message)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("--rdzv-conf join_timeot=3,timeout=60 train.py", "--rdzv-conf join_timeot=3"),
        ("--rdzv-endpoint= --rdzv-conf= --local-ranks-filter= --start-method=fork train.py", "--start-method fork"),
        ("--rdzv-conf \"'timeout=60'\" train.py", "--rdzv-conf 'timeout=60'"),
    ],
)
def test_options_without_effect_are_reported(line, note, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--dry-run", *shlex.split(line))
    assert f"note: no effect in ddplaunch: {note} (docs/torchrun.md)\n" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "environ", "world_size"),
    [
        ("train.py --nproc 2", {"PET_NPROC_PER_NODE": "3"}, 2),
        ("--nproc 2 train.py --nproc 2", {"PET_NPROC_PER_NODE": "3"}, 2),
        ("train.py --nnodes 2 --node-rank 0 --master-addr h", {"PET_STANDALONE": "1"}, 2),
    ],
)
def test_options_behind_the_target_override_variables(line, environ, world_size, run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--dry-run", "--json", *shlex.split(line), env=environ)
    assert json.loads(done.stdout)["world_size"] == world_size, done.stderr


@pytest.mark.parametrize("shell", ["bash", "tcsh"])
def test_completion_for_a_shell(shell, run_in_fork):
    done = run_in_fork("run", "--print-completion", shell)
    known = shell != "tcsh"
    assert (done.returncode, "_DDPLAUNCH_COMPLETE" in done.stdout) == (0 if known else 2, known)
    assert ("known: bash, zsh, fish" in done.stderr) is not known


# --------------------------------------------------------------------------------------------------- what it does

PRINTS = """
import os, sys
rank = os.environ["RANK"]
print(f"rank {rank} prints", flush=True)
print(f"rank {rank} warns", file=sys.stderr, flush=True)
"""


def find_prints(done) -> set[tuple[str, str]]:
    return {
        (name, match)
        for name, text in (("out", done.stdout), ("err", done.stderr))
        for match in re.findall(r"rank \d (?:prints|warns)", text)
    }


FORKS = """
import json, os, sys
from torch.distributed.run import main

for line in sys.stdin:
    folder, *words = json.loads(line)
    if (pid := os.fork()) == 0:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open("theirs.out", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open("theirs.err", os.O_WRONLY | os.O_CREAT), 2)
        try:
            exec(words[1]) if words[0] == "-c" else main(words)
            sys.stdout.flush()
            os._exit(0)  # to take torch apart takes a second
        finally:
            sys.exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""A process that has imported torchrun, and forks for each command line that it reads, or for ``-c STATEMENTS``."""


class Torchrun:
    """The installed one, imported once; ``torchrun(WORDS, cwd=FOLDER)`` runs it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        self._process = self._process or subprocess.Popen(
            [sys.executable, "-c", FORKS], env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            print(json.dumps([str(cwd), *words]), file=self._process.stdin, flush=True)
            code = int(self._process.stdout.readline())
        except BaseException:  # a time-out too: the next one starts anew
            self.end()
            raise
        output = ((cwd / f"theirs.{stream}").read_text() for stream in ("out", "err"))
        return subprocess.CompletedProcess(words, code, *output)

    def end(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def torchrun() -> Iterator[Torchrun]:
    torchrun = Torchrun()
    yield torchrun
    torchrun.end()


BEHIND = (
    "--nproc-per-node 1 train.py --nproc-per-node 3 --help --dry-run",
    "--nproc-per 1 --redirect=3 --log-dir logs train.py -- --nproc 3 -- x",
    "--stand train.py -- -- --dry-run",
    "--node_rank 0 -- train.py -- --token x",
    "--nproc_per_node 1 train.py --lr 1 -- --json",
    "--standalone --no-python train.sh --backend gloo -- --help",
)
"""Lines with a word of torchrun's own before the target: all behind it is the program's."""


@pytest.mark.ci
def test_the_program_gets_what_torchrun_gives_it(run_ddplaunch, torchrun, tmp_path):
    write_program(tmp_path, "train.py", "import sys; open('given', 'a').write(f'{sys.argv[1:]}\\n')\n")
    write_program(tmp_path, "train.sh", '#!/bin/sh\nexec python train.py "$@"\n').chmod(0o755)
    for line in BEHIND:
        words = shlex.split(line.replace("train.sh", "./train.sh"))
        theirs = torchrun(*words, cwd=tmp_path)
        ours = run_ddplaunch("run", *(LIGHT if "--no-python" not in words else ()), *words)
        assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr + ours.stderr
        given = (tmp_path / "given").read_text().splitlines()
        assert given[-1] == given[-2], line
    assert len(given) == 2 * len(BEHIND)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ("-r 3 -t 0:1", None),
        ("-r 1 --local-ranks-filter 0", None),
        ("--local-ranks-filter 1,2,3", "local ranks 2, 3"),
        ("-r 1:1,7:3", "local rank 7"),
        ("-t 3 --local-ranks-filter 1", None),
    ],
)
def test_the_console_shows_what_torchrun_shows(options, missing, run_ddplaunch, torchrun, tmp_path):
    """ddplaunch runs beside the installed torchrun, and shows all that it shows.

    Lines for eight GPUs run on small machines too: ddplaunch names the ranks that are missing there.
    """
    write_program(tmp_path, "train.py", PRINTS)
    line = ["--nproc-per-node", "2", *options.split(), "--log-dir", "logs", "train.py"]
    theirs = torchrun(*line, cwd=tmp_path)
    ours = run_ddplaunch("run", *LIGHT, *line)
    assert (theirs.returncode, ours.returncode) == (0, 0), theirs.stderr + ours.stderr
    assert find_prints(ours) == find_prints(theirs)
    note = f"ddplaunch: --show: node 0 has no {missing}, only local ranks 0 to 1\n"
    assert (note in ours.stderr) is (missing is not None)
    for rank in (0, 1):
        (log,) = (tmp_path / "logs").glob(f"*/rank-{rank}.log")
        assert f"rank {rank} prints" in log.read_text()
        assert f"rank {rank} warns" in log.read_text()


def test_redirects_without_a_folder_name_the_folder_of_logs(run_ddplaunch, tmp_path):
    write_program(tmp_path, "train.py", PRINTS)
    done = run_ddplaunch("run", *LIGHT, "--nproc-per-node", "2", "-r", "3", "train.py", env={"TMPDIR": str(tmp_path)})
    assert done.stdout == ""
    (kept,) = re.findall(r"log folder: (\S+)", done.stderr)
    assert kept.startswith(f"{tmp_path}/ddplaunch-logs-")
    assert "rank 1 prints" in Path(kept, "rank-1.log").read_text()


@pytest.mark.ci
def test_the_same_id_and_folder_again(run_ddplaunch, run_in_fork, tmp_path):
    """A script with a fixed --rdzv-id can be run again."""
    write_program(tmp_path, "train.py", PRINTS)
    for name in ("100", "100.2", "100.3"):
        done = run_ddplaunch("run", "--standalone", "--rdzv-id", "100", "--log-dir", "logs", "train.py")
        assert (done.returncode, f"log folder: logs/{name}\n" in done.stderr) == (0, True), done.stderr
    (tmp_path / "taken").write_text("")
    assert "--log-dir taken: " in run_in_fork("run", "--log-dir", "taken", "train.py").stderr


PARSES = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument({}, type=int)
parser.add_argument("--lr", type=float)
typed = parser.parse_args()
print("local rank", typed.local_rank, os.environ["LOCAL_RANK"], typed.lr)
"""


@pytest.mark.parametrize(
    ("names", "start"),
    [('"--local_rank"', FORKED), ('"--local-rank"', EXEC)],
)
def test_pass_local_rank_to_scripts(names, start, run_ddplaunch, tmp_path):
    """Scripts get the option in the form that they declare.

    torch.distributed.launch passes only the one with a dash.
    """
    write_program(tmp_path, "train.py", PARSES.format(names))
    done = run_ddplaunch("run", "--nproc_per_node", "2", "--pass-local-rank", *start, "train.py", "--lr", "0.5")
    assert sorted(done.stdout.splitlines()) == ["[0] local rank 0 0 0.5", "[1] local rank 1 1 0.5"], done.stderr


def test_a_function_needs_no_local_rank_passed(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "def main(local_rank): pass")
    assert_refused(run_in_fork("run", "--pass-local-rank", "train.py:main"), "a parameter named local_rank gets it")


@pytest.mark.slow
def test_virtual_local_rank_shows_each_rank_one_gpu(run_ddplaunch, tmp_path, fake_nvml):
    write_program(
        tmp_path,
        "train.py",
        """
        import os
        names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "DDPLAUNCH_DEVICE")
        print(*(os.environ[name] for name in names))

        def main(local_rank, device: str):
            print(local_rank, device, os.environ["CUDA_VISIBLE_DEVICES"])
    """,
    )
    environ = {**fake_nvml.environ(4), "CUDA_VISIBLE_DEVICES": "3,1"}
    done = run_ddplaunch("run", *LIGHT, "--virtual_local_rank", "train.py:main", env=environ)
    for rank, gpu in enumerate((3, 1)):
        imported, called = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert imported == f"[{rank}] {rank} 0 {gpu} cuda:0"
        assert called == f"[{rank}] 0 cuda:0 {gpu}"


# ------------------------------------------------------------------------------------------------------- submitting


def test_submit_accepts_options_of_torchrun(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    line = ["--nodes", "2", "--nproc_per_node", "4", "--rdzv_id", "j", "-r", "3", "--log_dir", "logs", "train.py"]
    done = run_in_fork("submit", "--dry-run", *line, env={"PET_MAX_RESTARTS": "3"})
    assert done.returncode == 0, done.stderr
    assert "--nproc 4 --run-id j --log-dir logs --show none train.py" in done.stdout
    assert "--max-restarts" not in done.stdout, "the variable is there when the job runs"
