"""Tests of ``ddplaunch submit`` with stand-ins for Slurm's programs: output, refusals, following and exit codes."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from ddplaunch.cli import launcher_command
from ddplaunch.features.submit import batch_command
from ddplaunch.features.submit.options import pass_through_words
from tests.conftest import assert_refused, conflict, ddplaunch_command, run_command, write_program
from tests.features.submit.states import REJECTED, SHORT_INTERVALS

SBATCH = """
    #!/bin/sh
    cat > "$STATE/script"
    env > "$STATE/environment"
    echo "$@" > "$STATE/words"
    [ -z "$REFUSAL" ] || { echo "$REFUSAL" >&2; exit 1; }
    echo "${ANSWER-77}"
    """

SCONTROL = """
    #!/bin/sh
    case "$1" in ping) [ ! -e "$STATE/down" ] || echo "Slurmctld(primary) at n0 is DOWN"; exit ;; esac
    # Plays step 0, 1, … of the job's life, one for each question, and the last one ever after.
    n=$(cat "$STATE/n")
    [ -e "$STATE/step-$((n + 1))" ] && echo $((n + 1)) > "$STATE/n"
    say() { echo "JobId=77 JobState=$1 Reason=$2 Requeue=1 Restarts=${4-0} ExitCode=$3 StdOut=$STATE/log Power="; }
    . "$STATE/step-$n"
    """

SQUEUE = """
    #!/bin/sh
    # Prints what is in a file, one word for each field that is asked for: number, id, state, reason, code, restarts.
    echo "$@" >> "$STATE/asked"
    [ -e "$STATE/jobs" ] || { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }
    while read -r typed id state reason code restarts host; do
        printf '%-64s%-16s%-32s%-96s%-16s%-12s%-256s%-24s\\n' $typed $id $state $reason $code $restarts "$host" N/A
    done < "$STATE/jobs"
    """

SCANCEL = """
    #!/bin/sh
    echo "$@" > "$STATE/cancelled"
    echo "say CANCELLED None 0:15" > "$STATE/step-1"
    echo 1 > "$STATE/n"
    """


class Cluster:
    """A Slurm of shell scripts; ``environ`` puts it on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cluster"
        for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL), ("squeue", SQUEUE), ("scancel", SCANCEL)):
            write_program(self.folder, f"bin/{name}", text).chmod(0o755)
        (self.folder / "n").write_text("0")
        path = os.pathsep.join([str(self.folder / "bin"), "/usr/bin", "/bin"])
        self.environ = {**SHORT_INTERVALS, "PATH": path, "STATE": str(self.folder)}
        self.environ |= {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_STATE_HOME": str(folder / "state")}

    def plays(self, *steps: str) -> None:
        for number, step in enumerate(steps):
            (self.folder / f"step-{number}").write_text(step + "\n")

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def cluster(tmp_path):
    write_program(tmp_path, "train.py", "")
    write_program(tmp_path, "fn.py", "def main(lr: float): pass\n")
    (tmp_path / "folder").mkdir()
    return Cluster(tmp_path)


@pytest.fixture
def submit(run_in_fork, cluster, tmp_path):
    """Run ``ddplaunch submit WORDS`` on that cluster."""

    def run(line: str, env: dict[str, str] | None = None, cwd: Path | None = None):
        return run_in_fork("submit", *shlex.split(line), env={**cluster.environ, **(env or {})}, cwd=cwd)

    return run


@pytest.fixture
def dry(submit):
    """The script that a command line makes, and the lines about it."""

    def run(line: str, **options):
        done = submit(f"--dry-run {line}", **options)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr.splitlines()

    return run


def last_words(script: str) -> list[str]:
    """Return the words after ``ddplaunch run`` in the script."""
    *_, interpreter, words = script.partition("\ncode=$?\n")[0].splitlines()
    assert shlex.split(interpreter.rstrip("\\")) == launcher_command(sys.executable)
    assert words.startswith("  run --cluster slurm ")
    return shlex.split(words)[3:]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.py", "train.py"),
        ("train.py --lr 0.1", "train.py -- --lr 0.1"),
        ("--max-restarts 2 train.py --nodes 2 -- --lr 0.1", "--max-restarts 2 train.py -- --lr 0.1"),
        ("--nodes 2 --max-restarts=2 train.py --lr 0.1", "--max-restarts=2 train.py -- --lr 0.1"),
        ("--max-restarts 2 --nodes 2 train.py a", "--max-restarts 2 train.py -- a"),
        ("--max-restarts 2 train.py --nodes 2 a", "--max-restarts 2 train.py -- a"),
        ("--time=5m train.py --nodes 2 --nproc 4 --gpus-per-node 2 a", "--nproc 4 train.py -- a"),
        ("train.py -- --nodes 2", "train.py -- --nodes 2"),
        ("-m --nodes 2 --grace 5 timeit --nproc 2", "-m --grace 5 --nproc 2 timeit"),
        ("--no-python --nodes 2 /bin/echo -n x", "--no-python /bin/echo -- -n x"),
        ("fn.py:main --lr 1", "fn.py:main -- --lr 1"),
        ("--nodes 2 train.py -- 'a b' '$HOME' \"it's\"", "train.py -- 'a b' '$HOME' \"it's\""),
    ],
)
def test_which_words_are_for_run(dry, line, words):
    script, _ = dry(line)
    assert last_words(script) == shlex.split(words)
    assert last_words(dry(shlex.join(last_words(script)))[0]) == last_words(script), "read alike again"


@pytest.mark.parametrize("line", ["train.py --dry-run", "train.py --lr 1 --dry-run", "train.py --nodes 2 --dry-run"])
def test_dry_run_after_the_target_submits_nothing(submit, cluster, tmp_path, line):
    assert_refused(submit(line), "ddplaunch's:   ddplaunch submit ")
    assert not (cluster.folder / "script").exists()
    write_program(tmp_path, "train.py", "parser.add_argument('--dry-run')")
    assert submit(line).returncode == 0
    assert last_words(cluster.read("script"))[-1] == "--dry-run"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", ("the target is missing", "ddplaunch submit train.py")),
        ("--nodes 2 train.py --time 3", ("--time could be", "submit --nodes 2 --time 3 train.py", "-- --time 3")),
        ("train.py -p a100", ("-p could be ", "submit -p a100 train.py", "train.py -- -p a100")),
        ("train.py --node 2", ("--node could be ddplaunch's --nodes", "submit --nodes 2 train.py", "-- --node 2")),
        ("--nodes 2 --gpus 8 train.py",
         ("--gpus 8 does not request GPUs: it selects", "--gpus-per-node 8 requests 8 on each node")),
        ("--gpus-per-node 8 --gpus 8 train.py", ("--gpus 8 does not request GPUs",)),
        ("--gpus=a100:8 train.py", ("--gpus-per-node a100:8 requests 8 on each node",)),
        ("train.py --lr 1 --nodes 2", ("--nodes could be", "ddplaunch submit --nodes 2 train.py --lr 1")),
        ("--nprco 2 train.py", ("no such option: --nprco", "did you mean --nproc?")),
        ("-N2 train.py", ("no such option: -N2", "did you mean -N 2?")),
        ("--ntasks-per-node 8 train.py", ("no such option: --ntasks-per-node", "did you mean --nproc?")),
        ("--xyzzy train.py", ("ddplaunch submit --help",)),
        ("train.py --nnodes 2", (conflict("--nnodes", "ddplaunch submit"), "--nodes N")),
        ("--node-rank 0 train.py", (conflict("--node-rank", "ddplaunch submit"), "the scheduler numbers the nodes")),
        ("--master-addr=a train.py", (conflict("--master-addr", "ddplaunch submit"), "leave it out")),
        ("--token x train.py", (conflict("--token", "ddplaunch submit"), "set DDPLAUNCH_TOKEN")),
        ("--dry-run --json train.py", (conflict("--json", "ddplaunch submit"), "--dry-run prints the script")),
        ("trian.py", ("no such script: trian.py", "did you mean train.py?")),
        ("fn.py:main", ("fn.py:main needs --lr", "its signature")),
        ("--nodes 0 train.py", ("--nodes 0: expected a number of nodes, 1 or more",)),
        ("--time 90 train.py", ("--time 90: no unit", "--time 90m for minutes, --time 90s for seconds")),
        ("-t 4x train.py", ("--time 4x: expected a time with a unit like 4h", "like 4:00:00")),
        ("--time 1:2:3:4 train.py", ("--time 1:2:3:4: expected a time",)),
        ("--mem lots train.py", ("--mem lots: expected a size", "200G")),
        ("--gpus-per-node eight train.py", ("--gpus-per-node eight: expected a number",)),
        ("--array a train.py", ("--array a: expected a list",)),
        ("--array 0-3 --follow train.py", (conflict("--follow", "--array 0-3"), "leave one")),
        ("--sbatch-arg contiguous train.py", ("contiguous: expected an option of sbatch", "--sbatch-arg=--contiguous")),
        ("--sbatch-arg=--time=5 train.py", ("ddplaunch has --time itself", "use --time")),
        ("--sbatch-arg='-q x' train.py", ("ddplaunch has --qos itself", "use --qos")),
        ("--begin='now + 1hour' train.py", ("pass it on: --sbatch-arg='--begin=now + 1hour'\n",)),
        ("--nodes 2 --cpus_per_gpu 4 train.py", ("pass it on: --sbatch-arg=--cpus-per-gpu=4\n",)),
        ("-H --nodes 2 train.py", ("-H is an option of sbatch", "pass it on: --sbatch-arg=--hold\n")),
        ("-d afterok:1 train.py", ("no such option: -d", "did you mean --dependency?")),
        ("--exclusive=user train.py", ("--exclusive takes no value here", "--sbatch-arg=--exclusive=user")),
        ("--dependency okay:1 train.py", ("--dependency okay:1: expected conditions like afterok:4711",)),
        ("--mail-type END,DONE train.py", ("--mail-type END,DONE: expected a list like END,FAIL, of NONE",)),
        ("--mem-per-cpu 0.5G train.py", ("--mem-per-cpu 0.5G: expected a size like 50G",)),
        ("--mem 9G --mem-per-cpu 1G train.py", ("--mem 9G and --mem-per-cpu 1G exclude each other", "leave one out")),
        ("--mem-per-gpu 9G train.py", ("--mem-per-gpu 9G: the job asks for no GPU", "--gpus-per-node 8")),
        ("--gpus-per-node 8 --gpus-per-task 1 train.py",
         ("--gpus-per-task 1 and --gpus-per-node 8 differ", "--gpus-per-node 8 without")),
        ("--gres nvme:1,gpu:a100:4 --gpus-per-task 1 train.py", ("and --gres nvme:1,gpu:a100:4 differ",)),
        ("--nodelist n[1-3] --exclude n2,n5 train.py", ("--exclude n2,n5 both have n2", "out of one of them")),
        ("--srun-arg cpu-bind=none train.py", ("expected an option of srun", "--srun-arg=--cpu-bind=none")),
        ("--srun-arg='--label -N1 --nodes 2' train.py", ("the script sets --nodes itself", "--dry-run")),
        ("--teardown bye.sh train.py", ("--teardown bye.sh: no such file in ",)),
        ("--teardown 'rm x \\\\\\' train.py", ("--teardown rm x \\\\\\: the backslash at its end joins the next",)),
        ("--error train.py/%j.err train.py", ("cannot write the log: ", "--error DIR/%j.err")),
        ("--requeue often train.py", ("--requeue often: expected a number of times, like 3",)),
        ("--requeue 2 --time 2:0 train.py",
         ("--time 2:0 is 120 s", "the signal comes 120 s before the end", "longer --time")),
        ("--requeue 2 --preempt-grace 60 --grace 5 --time 0:1:5 train.py",
         ("65 s before the end (--preempt-grace 60 and",)),
        ("--requeue 2 --preempt-signal none train.py", (conflict("--requeue 2", "--preempt-signal none"),)),
        ("--requeue 2 --preempt-signal TERM train.py", ("--preempt-signal TERM", "a cancelled job must not come back")),
        ("--requeue-on 1 train.py", ("--requeue-on 1 does nothing without --requeue N", "--requeue 3 --requeue-on 1")),
        ("--requeue 2 --requeue-on 1,0 train.py", ("--requeue-on 1,0: expected exit codes from 1 to 255",)),
        ("--scheduler lsf --code . train.py", ("--code does not work with --scheduler lsf",)),
        ("--code nowhere train.py", ("--code nowhere: no such folder",)),
        ("--code . --log-dir logs train.py", ("--log-dir logs does not work with --code", "absolute path")),
        ("--requeue 2 --sbatch-arg=--signal=USR1@9 train.py",
         (conflict("--signal=USR1@9", "--requeue 2"), "--preempt-grace")),
        ("--sbatch-arg=--ntasks-per-node=4 train.py", ("ddplaunch sets --ntasks-per-node itself", "--nproc")),
        ("--setup evn.sh train.py", ("--setup evn.sh: no such file in ",)),
        ("--output /proc/%j.out train.py", ("cannot write the log: /proc", "another folder")),
        ("--output folder train.py", ("cannot write the log: ", "folder: Is a directory")),
    ],
)  # fmt: skip
def test_refused(submit, cluster, line, expected):
    assert_refused(submit(line), *expected)
    assert not (cluster.folder / "script").exists(), "it was submitted"


OPTIONS_OF_SBATCH = {
    "-b": "--begin=x", "-B": "--extra-node-info=x", "-F": "--nodefile=x", "-i": "--input=x", "-L": "--licenses=x",
    "-M": "--clusters=x", "-S": "--core-spec=x",
    "-H": "--hold", "-k": "--no-kill", "-O": "--overcommit", "-s": "--oversubscribe", "-W": "--wait",
}  # fmt: skip
"""Options of sbatch(1) that ddplaunch lacks, by their letters; with a value x where they need one."""


@pytest.mark.parametrize("letter", OPTIONS_OF_SBATCH)
def test_a_letter_of_sbatch_is_passed_on_as_its_long_option(letter):
    option = OPTIONS_OF_SBATCH[letter]
    name, equals, value = option.partition("=")
    expected = f"--sbatch-arg={option}"
    assert pass_through_words([letter, "x"]) == pass_through_words([name, "x"]) == expected
    assert pass_through_words([letter + equals + value]) == pass_through_words([option]) == expected


@pytest.mark.parametrize("word", ["-y", "--xyzzy", "hold", "-hold", "wait=1"])
def test_other_words_are_not_passed_on_to_sbatch(word):
    assert pass_through_words([word, "x"]) is None


def test_an_option_is_in_one_section_of_the_help(monkeypatch):
    """Where a scheduler's command has it itself; an option of ``run`` that it refuses is in none."""
    of_run = {"Time": ["--timeout", "--grace"], "Logs": ["--log-dir", "--output", "--show"], "Hosts": ["--hosts"]}
    monkeypatch.setattr(batch_command, "SECTIONS", of_run)
    nodes, time, output = (batch_command.option(names, "X", "") for names in ("-N --nodes", "-t --time", "--output"))
    assert batch_command.option_sections({"Resources": [nodes, time], "Logs": [output]}, {"--hosts": "no"}) == {
        "Resources": ["--nodes", "--time"],
        "Logs": ["--output", "--log-dir", "--show"],
        "Time": ["--timeout", "--grace"],
        "Hosts": [],
    }


def test_a_project_may_have_its_code_copied(run_in_fork, tmp_path):
    """The folder in its pyproject.toml is relative to that file, and a dry run writes nothing."""
    folder = tmp_path / "project/exp"
    write_program(folder, "train.py", "")
    (folder.parent / "pyproject.toml").write_text('[tool.ddplaunch.submit]\ncode = "."\n')
    done = run_in_fork("submit", "--dry-run", "train.py", cwd=folder)
    name = re.findall(r"code: .*/exp/\.ddplaunch/code/(\w+) \(", done.stderr)[0]
    assert f"  --chdir={folder}/.ddplaunch/code/{name}/exp \\\n" in done.stdout
    assert "--chdir" not in run_in_fork("submit", "--dry-run", "--code", "none", "train.py", cwd=folder).stdout.replace(
        "#SBATCH --chdir", ""
    )
    assert sorted(os.listdir(folder)) == ["train.py"]


def test_a_rejected_job_leaves_no_copy_of_its_code(submit, tmp_path):
    """Unless another job had it before."""
    write_program(tmp_path, "train.py", "")
    folder = tmp_path / ".ddplaunch/code"
    refusal = {"REFUSAL": "sbatch: error: Invalid partition name specified"}
    assert_refused(submit("--code . train.py", env=refusal), "sbatch rejected the job")
    assert os.listdir(folder) == []
    assert submit("--code . train.py").returncode == 0
    made = sorted(os.listdir(folder))
    assert len(made) == 2
    assert_refused(submit("--code . train.py", env=refusal), "sbatch rejected the job")
    assert sorted(os.listdir(folder)) == made


def test_nodes_to_leave_out(dry, submit):
    """``--exclude`` is sbatch's option, not that of ``run``, which is for hosts over SSH."""
    script, lines = dry("--nodes 2 --exclude n[07-08] train.py")
    assert "#SBATCH --exclude=n[07-08]\n" in script
    assert last_words(script) == ["train.py"]
    assert "exclude: n[07-08] (--exclude)" in lines
    assert "did you mean --exclude?" in submit("-x n07 train.py").stderr
    assert "did you mean --qos?" in submit("-q high train.py").stderr  # which run knows as another launcher's
    assert "did you mean --gpus-per-node?" in submit("-G 8 train.py").stderr


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("--gpus-per-node 8 --gpus-per-task 8", ["gpus-per-node=8", "gpus-per-task=8"]),
        ("--gres gpu --gpus-per-task 1 --mem-per-gpu 9G", ["gres=gpu", "mem-per-gpu=9G"]),
        ("--gres gres/gpu:a100:4(S:0-1) --mem-per-gpu 9G", ["gres=gres/gpu:a100:4(S:0-1)"]),
        ("--sbatch-arg=--gpus-per-socket=2 --mem-per-gpu 9G", ["gpus-per-socket=2"]),
        ("--nodelist n[1-3] --exclude n[4-5]", ["nodelist=n[1-3]", "exclude=n[4-5]"]),
        ("--dependency afterok:1:2?afterany:3_*+5,singleton", ['dependency="afterok:1:2?afterany:3_*+5,singleton"']),
        ("--time unlimited", ["time=unlimited"]),
        ("--time 4h", ["time=4:00:00"]),
        ("-t 1.5d", ["time=36:00:00"]),
        ("--time 90s", ["time=0:01:30"]),
        (
            "-N 2 -p a100 -A lab -t 90m -c 8 -J mine",
            ["job-name=mine", "nodes=2", "cpus-per-task=8", "time=1:30:00", "partition=a100", "account=lab"],
        ),
        ("--gpus-per-node a100:8 --gpus 7", ["gpus-per-node=a100:8"]),
        ("--time 0", ["time=0"]),
        ("--exclusive --comment 'a b'", ["exclusive", 'comment="a b"']),
        ("--sbatch-arg=--exclusive=user", ["exclusive=user"]),
        ("--sbatch-arg=--cpus-per-gpu=4", ["cpus-per-gpu=4"]),
        ("--mail-type end,Time_Limit_90 --mail-user a@b", ["mail-type=end,Time_Limit_90", "mail-user=a@b"]),
    ],
)
def test_accepted_options_become_lines_of_sbatch(dry, line, lines):
    script, notes = dry(f"{line} train.py")
    for each in lines:
        assert f"#SBATCH --{each}\n" in script
    shares = not any(word in line for word in ("-c 8", "--cpus-per", "--exclusive"))
    assert any("Slurm may give each node one CPU" in note for note in notes) == shares


def test_memory_that_is_typed_is_not_that_of_a_file(dry, submit, cluster, tmp_path):
    write_program(tmp_path, "config/ddplaunch.toml", '[submit]\nmem = "200G"\nexclusive = true\ngpus-per-node = 8\n')
    script, _ = dry("train.py")
    assert "#SBATCH --mem=200G\n" in script
    assert "#SBATCH --exclusive\n" in script
    environment = {"SBATCH_MEM_PER_NODE": "3G", "SBATCH_EXCLUSIVE": "user"}
    assert submit("--mem-per-gpu 9G train.py", env=environment).returncode == 0
    assert "#SBATCH --mem-per-gpu=9G\n" in cluster.read("script")
    assert "--mem=" not in cluster.read("script")
    assert "SBATCH_MEM" not in cluster.read("environment")
    assert "SBATCH_EXCLUSIVE" not in cluster.read("environment")


def test_a_teardown_script_is_relative_to_its_file(dry, tmp_path):
    write_program(tmp_path, "config/ddplaunch.toml", '[submit]\nteardown = ["bye.sh", "rm -rf x"]\n')
    write_program(tmp_path, "config/bye.sh", "")
    assert f"  (source {tmp_path}/config/bye.sh)\n  (rm -rf x)\n" in dry("train.py")[0]


def test_the_target_of_an_image_is_not_looked_for_here(dry):
    script, lines = dry("--container-image img --container-mounts a:b -m not.here")
    assert "--container-image=img" in script
    assert "main()' \\\n  run --cluster slurm -m not.here\n" in script
    assert "note: the target was not checked: it is in the image" in lines


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_a_folder_that_would_be_two_mounts(submit, tmp_path, name):
    (tmp_path / name).mkdir()
    done = submit("--container-image img --dry-run train.py", cwd=tmp_path / name)
    assert_refused(done, f"{tmp_path / name} cannot be mounted in a container")
    write_program(tmp_path / name, "train.py", "")
    assert submit("--dry-run train.py", cwd=tmp_path / name).returncode == 0, "without a container it may"


@pytest.mark.parametrize("line", ["submit train.py", "run train.py", "run --hosts n1,n2 train.py"])
def test_an_empty_token_is_refused(run_in_fork, cluster, line):
    done = run_in_fork(*line.split(), env={**cluster.environ, "DDPLAUNCH_TOKEN": ""})
    assert_refused(done, "DDPLAUNCH_TOKEN is empty")
    assert not (cluster.folder / "script").exists()


@pytest.fixture
def files(tmp_path, cluster):
    project = write_program(
        tmp_path,
        "pyproject.toml",
        """
        [tool.ddplaunch.submit]
        partition = "general"
        nodes = 3
        follow = false
        setup = ["env.sh", "module load cuda/12"]
        """,
    )
    user = write_program(tmp_path, "config/ddplaunch.toml", '[submit]\naccount = "me"\npartition = "mine"\n')
    write_program(tmp_path, "env.sh", "")
    return project, user


def test_flags_over_project_over_user(dry, files, tmp_path):
    project, user = files
    (tmp_path / "deep").mkdir()
    script, lines = dry(
        "--nodes 2 --time 5m ../train.py", cwd=tmp_path / "deep", env={"SBATCH_QOS": "low", "SBATCH_ACCOUNT": "x"}
    )
    for line in ("nodes=2", "partition=general", "account=me", "time=0:05:00", "job-name=train.py"):
        assert f"#SBATCH --{line}\n" in script
    assert f"#SBATCH --chdir={tmp_path}/deep\n" in script
    assert f"source {tmp_path}/env.sh || exit\nmodule load cuda/12 || exit\n" in script, (
        "a file is looked for beside the one that names it"
    )
    assert lines[:8] == [
        "nodes: 2 (--nodes)",
        "time: 0:05:00 (--time)",
        f"partition: general ({project})",
        f"account: me ({user})",
        "qos: low (SBATCH_QOS, which sbatch reads)",
        "job-name: train.py (the target)",
        "output: slurm-%j.out (default)",
        f"setup: {tmp_path}/env.sh, module load cuda/12 ({project})",
    ]
    assert f"chdir: {tmp_path}/deep (the current folder)" in lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[submit]\npartitoin = 'x'\n", ("unknown key partitoin in [submit]", "did you mean partition?")),
        ("[submit]\ngpus_per_node = 8\n", ("unknown key gpus_per_node in", "did you mean gpus-per-node?")),
        ("[submit]\nnodes = [2]\n", ("[submit] nodes = [2]: expected a string or a number",)),
        ("[submit]\nnodes = true\n", ("nodes = True: expected a string",)),
        ("[submit]\nnodes = 'two'\n", ("--nodes two: expected a number", "ddplaunch.toml)")),
        ("[submit]\nfollow = 1\n", ("follow = 1: expected true or false",)),
        ("[submit]\nsetup = [1]\n", ("setup = [1]: expected a list of strings",)),
        ("[submit]\nsbatch-arg = 'x'\n", ("--sbatch-arg x: expected an option of sbatch (", "ddplaunch.toml)")),
        ("[sbumit]\nnodes = 2\n", ("unknown table [sbumit]", "ddplaunch reads [run], [submit], [manifest]")),
        ("submit = 3\n", ("[submit] is not a table",)),
        (f"x = {'[' * 5000}{']' * 5000}\n", ("ddplaunch.toml cannot be read:", "--config none reads no file")),
        (f"[submit]\nnodes = {'9' * 5000}\n", ("ddplaunch.toml cannot be read:", "--config none")),
        ("nodes =\n", ("ddplaunch.toml: TOML syntax error: Invalid value (at line 1",)),
    ],
)
def test_a_file_that_makes_no_sense(submit, tmp_path, text, expected):
    file = write_program(tmp_path, "config/ddplaunch.toml", text)
    assert_refused(submit("--dry-run train.py"), str(file), *expected)


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
OTHER_UID = 54321
"""A user that no machine has."""


@AS_ROOT
def test_a_file_of_another_user_is_not_read(submit, cluster, tmp_path):
    """A file of another user is ignored: it would run commands as this user (as in git's CVE-2022-24765)."""
    (tmp_path / "deep").mkdir()
    evil = write_program(
        tmp_path, "deep/pyproject.toml", '[tool.ddplaunch.submit]\nsetup = "touch /tmp/owned"\nnodes = 7\n'
    )
    write_program(tmp_path, "pyproject.toml", '[tool.ddplaunch.submit]\npartition = "general"\n')
    os.chown(evil, OTHER_UID, OTHER_UID)
    done = submit("../train.py", cwd=tmp_path / "deep")
    assert done.returncode == 0, done.stderr
    assert "owned" not in cluster.read("script")
    assert "#SBATCH --partition=general\n" in cluster.read("script"), "the next above is read"
    note = f"{evil} was not read: it belongs to user {OTHER_UID}, not to you; to read it: --config {evil}"
    assert f"ddplaunch: {note}\n" in done.stderr
    assert "#SBATCH --nodes=7\n" in submit(f"--dry-run --config {evil} ../train.py", cwd=tmp_path / "deep").stdout


@AS_ROOT
def test_a_link_of_another_user_chooses_no_file_of_ours(dry, tmp_path):
    write_program(tmp_path, "other/pyproject.toml", "[tool.ddplaunch.submit]\nnodes = 7\n")
    (tmp_path / "pyproject.toml").symlink_to("other/pyproject.toml")
    assert "#SBATCH --nodes=7\n" in dry("train.py")[0]
    os.lchown(tmp_path / "pyproject.toml", OTHER_UID, OTHER_UID)
    assert "#SBATCH --nodes=1\n" in dry("train.py")[0]


@AS_ROOT
def test_a_file_without_our_table_is_passed_over_whose_ever_it_is(dry, tmp_path):
    path = write_program(tmp_path, "pyproject.toml", '[project]\nname = "x"\n')
    for _ in range(2):
        assert "nodes: 1 (default)" in (lines := dry("train.py")[1])
        assert "not read" not in "\n".join(lines)
        os.chown(path, OTHER_UID, OTHER_UID)


@pytest.mark.parametrize("border", ["home", "repository"])
def test_the_folders_in_which_a_file_is_searched(dry, tmp_path, border):
    write_program(tmp_path, "pyproject.toml", "[tool.ddplaunch.submit]\nnodes = 7\n")
    (tmp_path / "a/b").mkdir(parents=True)
    line, at = "../../train.py", {"cwd": tmp_path / "a/b"}
    assert "#SBATCH --nodes=7\n" in dry(line, **at)[0]
    if border == "home":
        at["env"] = {"HOME": str(tmp_path / "a")}
    else:
        (tmp_path / "a/.git").mkdir()
    assert "#SBATCH --nodes=1\n" in dry(line, **at)[0]
    write_program(tmp_path, "a/pyproject.toml", "[tool.ddplaunch.submit]\nnodes = 3\n")
    assert "#SBATCH --nodes=3\n" in dry(line, **at)[0], "there it is still read"


def test_a_file_that_is_named(dry, submit, files, tmp_path):
    other = write_program(tmp_path, "conf/site.toml", '[submit]\nqos = "low"\nsetup = "here.sh"\n')
    write_program(tmp_path, "conf/here.sh", "")
    script, lines = dry("--config conf/site.toml train.py")
    assert "#SBATCH --qos=low\n" in script
    assert "general" not in script, "instead of the project's"
    assert f"source {tmp_path}/conf/here.sh || exit\n" in script
    assert f"qos: low ({other})" in lines
    script, _ = dry("--config none train.py")
    assert "partition" not in script
    assert "account" not in script
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    for name, expected in (
        ("nosuch", "cannot read"),
        ("pipe", "is not a regular file"),
        ("large", "has more than 1 MiB"),
    ):
        assert_refused(submit(f"--config {name} train.py"), expected)


def test_values_from_files_are_shown_when_a_job_is_submitted(submit, files):
    project, user = files
    done = submit("--nodes 2 train.py")
    assert done.returncode == 0, done.stderr
    for line in f"partition: general ({project})", f"account: me ({user})":
        assert f"ddplaunch: {line}\n" in done.stderr
    assert "module load cuda/12" in done.stderr
    assert "nodes:" not in done.stderr, "it was typed"


def test_submitted(submit, cluster, tmp_path):
    environment = {"SBATCH_PARTITION": "x", "SBATCH_QOS": "y", "SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "2"}
    done = submit("--nodes 2 --partition a --output logs/%j.txt train.py", env=environment)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "job 77: train.py on 2 nodes",
        f"log: {tmp_path}/logs/77.txt",
        "follow: ddplaunch attach 77",
        "cancel: ddplaunch stop 77",
    ]
    assert (tmp_path / "logs").is_dir(), "Slurm would not make it"
    assert cluster.read("words") == "--parsable\n"
    assert cluster.read("script") == submit("--dry-run --nodes 2 --partition a --output logs/%j.txt train.py").stdout
    got = cluster.read("environment").splitlines()
    assert "SBATCH_QOS=y" in got, "nothing else says it"
    left_out = ("SBATCH_PARTITION=", "SLURM_JOB_ID=", "SLURM_CPUS_PER_TASK=")
    assert not [line for line in got if line.startswith(left_out)]
    array = submit("--array 0-3 train.py", env={"ANSWER": "Hello from the site\n77;north"}).stdout.splitlines()
    assert array[1:3] == [f"log: {tmp_path}/slurm-77_%a.out", "follow: ddplaunch attach 77_INDEX"]


def test_a_job_that_cannot_be_recorded_is_cancelled_by_the_scheduler(submit):
    """Where the record of a job cannot be written, as on a full disk, no command that needs it is shown."""
    shown = submit("train.py", env={"XDG_STATE_HOME": "/proc"}).stdout.splitlines()
    assert shown[2:] == ["follow: ddplaunch attach 77", "cancel: scancel 77"]


def test_a_dry_run_is_byte_for_byte_what_is_submitted(cluster, tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9 \x1b[31m"
    os.mkdir(folder)
    (tmp_path / "train.py").rename(os.fsdecode(folder + b"/train.py"))
    words = ["submit", "train.py", "--", b"\xff", "\x1b[1mbold\x1b[0m", "a\nb"]

    def run(*more: str) -> bytes:
        typed = [*ddplaunch_command(), *words[:1], *more, *words[1:]]
        return run_command(typed, folder, cluster.environ, text=False, check=True).stdout

    printed = run("--dry-run")
    output = run()
    assert printed == (cluster.folder / "script").read_bytes()
    assert b'#SBATCH --chdir="' + folder in printed
    assert folder + b"/slurm-77.out" in output


@pytest.mark.parametrize(
    ("words", "program", "system"),
    [("", "sbatch", "Slurm"), ("--scheduler sge --pe mpi", "qsub", "Grid Engine"), ("--scheduler pbs", "qsub", "PBS"),
     ("--scheduler lsf", "bsub", "LSF")],
)  # fmt: skip
def test_a_machine_without_the_scheduler(submit, tmp_path, words, program, system):
    (tmp_path / "empty").mkdir()
    done = submit(f"{words} train.py", env={"PATH": str(tmp_path / "empty")})
    assert_refused(done, f"{program} is not on PATH: this machine has no commands of {system}", "--dry-run")


def test_slurm_cannot_be_reached(submit):
    refusal = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    done = submit("train.py", env={"REFUSAL": refusal})
    assert done.returncode == 69
    said = [refusal, "Error: sbatch cannot reach Slurm: no job was submitted"]
    assert done.stderr.splitlines()[-3:-1] == said


@pytest.mark.parametrize(
    ("refusal", "hint"),
    [
        ("sbatch: error: invalid partition specified: x", "sinfo -s lists the partitions"),
        ("sbatch: error: Invalid account or account/partition combination specified", "lists the accounts"),
        ("sbatch: error: Invalid qos specification", "sacctmgr show qos"),
        ("sbatch: error: Batch job submission failed", "--dry-run shows the script"),
    ],
)
def test_sbatch_refuses(submit, refusal, hint):
    done = submit("--partition x --follow train.py", env={"REFUSAL": refusal})
    assert done.returncode == 2
    lines = done.stderr.splitlines()[-3:]
    assert lines[:2] == [refusal, f"Error: sbatch {REJECTED} 1)"]
    assert hint in lines[2]


def test_a_reply_without_a_job_id(submit):
    done = submit("train.py", env={"ANSWER": "see you"})
    assert done.returncode == 1
    assert "its output has no job id: 'see you'" in done.stderr


def test_follow_survives_a_requeue_and_a_failed_query(submit, cluster):
    """``--follow`` continues in the same log after a requeue, and after a query that Slurm did not answer."""
    cluster.plays(
        "say PENDING Resources 0:0",
        'printf "one\\ntw" >> "$STATE/log"; say RUNNING None 0:0',
        'printf "o\\n\\377" >> "$STATE/log"; echo "slurm_load_jobs error: Unable to contact" >&2; exit 1',
        "say COMPLETING None 0:0",
        "say PENDING BeginTime 0:0 1",
        'echo three >> "$STATE/log"; say RUNNING None 0:0 1',
        "say FAILED NonZeroExitCode 3:0 1",
    )
    done = submit("--follow --cpus-per-task 2 train.py")
    assert done.returncode == 3
    assert done.stdout == "one\ntwo\n\udcffthree\n"
    lines = [line.removeprefix("ddplaunch: job 77") for line in done.stderr.splitlines()]
    assert lines[0] == ": train.py on 1 node"
    assert lines[-6:] == [
        " waits: Resources",
        " is running",
        " is completing",
        " was requeued and waits: BeginTime",
        " is running again (restart 1)",
        " failed (exit code 3)",
    ]


def test_stderr_that_is_apart(submit, cluster, tmp_path):
    """The folder of ``--error`` is created, and ``--follow`` shows that file on stderr."""
    cluster.plays('echo one >> "$STATE/log"; echo two >> "$STATE/errors"; say COMPLETED None 0:0')
    scontrol = cluster.folder / "bin/scontrol"
    scontrol.write_text(scontrol.read_text().replace("ExitCode=$3 ", "ExitCode=$3 StdErr=$STATE/errors "))
    done = submit("--error errs/%j.err --follow --cpus-per-task 2 train.py")
    assert (done.returncode, done.stdout) == (0, "one\n")
    assert f"ddplaunch: errors: {tmp_path}/errs/77.err\n" in done.stderr
    assert "two\nddplaunch: job 77 completed" in done.stderr
    assert (tmp_path / "errs").is_dir()
    assert "#SBATCH --error=errs/%j.err\n" in cluster.read("script")


@pytest.mark.parametrize(
    ("last", "code", "expected"),
    [
        ("say TIMEOUT TimeLimit 0:15", 143, "job 77 reached its time limit (exit code 143)"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", 1, "Slurm no longer knows job 77"),
    ],
)
def test_follow_ends_as_the_job_ends(submit, cluster, last, code, expected):
    cluster.plays(last)
    done = submit("--follow train.py")
    assert done.returncode == code
    assert expected in done.stderr


def test_a_site_without_pyxis(submit, cluster):
    def srun(text):
        write_program(cluster.folder, "bin/srun", f"#!/bin/sh\n{text}\n").chmod(0o755)

    expected = "srun has no --container-image here"
    srun("echo '  --cpu-bind=…  Bind tasks'")
    assert expected in submit("--container-image img train.py").stderr
    assert expected not in submit("train.py").stderr
    srun("echo '  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'")
    assert expected not in submit("--container-image img train.py").stderr


@pytest.mark.parametrize("streams", ["", "2>&1"])
def test_a_reader_that_has_read_enough(cluster, tmp_path, streams):
    cluster.plays('seq 100000 >> "$STATE/log"; say RUNNING None 0:0')
    command = f"{shlex.join(ddplaunch_command('submit', '--follow', 'train.py'))} {streams}"
    done = run_command(["bash", "-c", f"{command} | head -n 1; echo ${{PIPESTATUS[0]}}"], tmp_path, cluster.environ)
    first, code = done.stdout.splitlines()
    assert code == "141"
    assert streams or (first == "1" and "job 77 keeps running" in done.stderr)
    assert "Traceback" not in done.stderr


def test_a_log_that_cannot_be_read_does_not_end_the_command(submit, cluster):
    (cluster.folder / "log").symlink_to("/proc/self/mem")  # to read there fails
    cluster.plays("say RUNNING None 0:0", "say COMPLETED None 0:0")
    done = submit("--follow train.py")
    assert done.returncode == 0
    assert f"cannot read {cluster.folder}/log: Input/output error" in done.stderr
    assert "job 77 completed" in done.stderr


def test_a_log_that_a_requeued_job_writes_anew(submit, cluster):
    cluster.plays(
        'seq 100 > "$STATE/log"; say RUNNING None 0:0',
        'echo again > "$STATE/log"; say RUNNING None 0:0',
        "say COMPLETED None 0:0",
    )
    assert submit("--follow train.py").stdout.splitlines()[-2:] == ["100", "again"]


def test_ctrl_c_without_a_terminal_detaches(cluster, start_ddplaunch):
    cluster.plays('echo begun >> "$STATE/log"; say RUNNING None 0:0')
    job = start_ddplaunch("submit", "--follow", "train.py", env=cluster.environ)
    job.wait_for("begun")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert "job 77 keeps running; its log: " in job.stderr()
    assert not (cluster.folder / "cancelled").exists()


@pytest.mark.parametrize(("answers", "code"), [(["c\r"], 143), (["d\r"], 130), (["\x04"], 130), (["f\r", "c\r"], 143)])
def test_ctrl_c_asks(cluster, at_terminal, answers, code):
    cluster.plays('echo begun >> "$STATE/log"; say RUNNING None 0:0')
    each = at_terminal(ddplaunch_command("submit", "--follow", "train.py"), cluster.environ)
    for answer in answers:
        each.until(lambda each: each.rows[-1:] == ["begun"])
        each.type("\x03")
        each.until(lambda each: each.rows[-1].endswith("[f]ollow on?"))
        each.type(answer)
    assert each.end() == code
    assert (cluster.folder / "cancelled").exists() == ("c\r" in answers)
