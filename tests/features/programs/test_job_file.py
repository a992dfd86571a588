"""Tests of job files: what they say is the same as on a command line, and what is wrong in them has its line."""

import json
import re
import sys

import pytest

from tests.conftest import PROGRAMS, write_program
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.start_modes import EXEC

CLIENT = PROGRAMS / "client.py"
SERVER = f"{sys.executable} {PROGRAMS / 'server.py'} {{port}}"

JOB = f"""
[programs.vllm]
command = '''{SERVER}
             late=0.2'''
ready = "http:/health"
env = {{ LEVEL = 3 }}

[programs.env]
command = ["sh", "-c", "echo after {{vllm}} $LEVEL.; exec sleep 1000"]
after = ["vllm"]

[programs.trainer]
target = "{CLIENT} http://{{vllm}} once"
after = ["vllm", "env"]
"""


@pytest.mark.ci
def test_a_job_from_a_file(start_ddplaunch, tmp_path):
    (tmp_path / "rl.toml").write_text(JOB)
    job = start_ddplaunch("run", "--nproc", "2", *EXEC, "rl.toml", "--log-dir", "logs")
    assert job.wait() == 2
    assert "rl.toml takes no arguments: --log-dir" in job.stderr()
    job = start_ddplaunch("run", *EXEC, "rl.toml", "--nproc", "2")
    assert job.wait() == 0, job.stderr()
    port = re.search(r"vllm: port (\d+)", job.stderr())[1]
    assert job.stdout().count(f"got ok from http://127.0.0.1:{port}") == 2
    assert f"[env] after 127.0.0.1:{port} .\n" in job.stderr()
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_service_that_fails_is_named_before_its_target(start_ddplaunch, tmp_path):
    file = (
        '[programs.web]\ncommand = "sh -c \'sleep 0.3; exit 4\'"\n[programs.trainer]\ntarget = "--no-python sleep 60"\n'
    )
    (tmp_path / "rl.toml").write_text(file)
    job = start_ddplaunch("run", "rl.toml")
    assert job.wait() == 4
    assert "web exited with code 4 before trainer was done (exit code 4)" in job.stderr()


def test_a_dry_run(run_in_fork, tmp_path, fake_nvml):
    file = JOB.replace("[programs.trainer]", "[programs.trainer]\ngpus = 2").replace("late=0.2", "") + "\n"
    (tmp_path / "rl.toml").write_text(file.replace("ready =", "gpus = 4\nready ="))
    done = run_in_fork("run", "--dry-run", "rl.toml", env=fake_nvml.environ(8))
    assert done.returncode == 0, done.stderr
    rows = [re.sub(" {2,}", "  ", line) for line in done.stdout.splitlines() if line.startswith("program ")]
    assert rows[0].startswith("program vllm  service  node 0  GPUs 0-3  ready http:/health  after -  ")
    assert rows[1].startswith("program env  service  node 0  GPUs -  ready -  after vllm  sh -c ")
    plan = json.loads(run_in_fork("run", "rl.toml", "--dry-run", "--json", env=fake_nvml.environ(8)).stdout)
    assert plan["world_size"] == 2
    assert [(each["name"], each["gpus"], each["after"]) for each in plan["programs"]] == [
        ("vllm", [0, 1, 2, 3], []),
        ("env", [], ["vllm"]),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "[programs.vllm]\ncommand = 'sleep 9'\nredy = 'tcp'",
            (":3: programs.vllm.redy: no such key", "mean ready?"),
        ),
        (
            "[programs.vllm]\nkind = 'servce'\ncommand = 'x'",
            (":2: programs.vllm.kind servce: expected", "service?"),
        ),
        ("[programs.vllm]\nkind = 'service'", ("rl.toml:1: programs.vllm: it has no command and no target", "")),
        ("[programs.t]\ncommand = 'x'\ntarget = 't.py'", ("rl.toml:1: programs.t: it has a command and a target", "")),
        (
            "[programs.t]\ntarget = 't.py'\nready = 'tcp'",
            ("rl.toml:3: programs.t.ready: the job's own ranks do not have that", ""),
        ),
        ("[programs.t]\ntarget = '--nproc 2'", ("rl.toml: programs.t.target has no target", "")),
        (
            "[programs.t]\ntarget = 't.py'\n[programs.teacher]\ntarget = '--nproc 2'\nkind = 'service'",
            ("rl.toml: programs.teacher.target has no target", ""),
        ),
        ("[programs.t]\ntarget = 't.py'\nwith = 'x'", ("rl.toml:3: programs.t.with: the job's own ranks do not", "")),
        ("[programs.a]\ncommand = 'sleep 9'\n", ("rl.toml: no program has a target", "")),
        (
            "[programs.t]\ntarget = 't.py'\n[programs.envs]\ncommand = 'x'\nafter = ['infer']\n"
            "[programs.infer]\nafter = ['envs']\ncommand = 'x'",
            ("envs, infer come after each other", ""),
        ),
        (
            "[programs.t]\ntarget = 't.py'\n[programs.envs]\ncommand = 'x'\nafter = ['infr']\n"
            "[programs.infer]\ncommand = 'x'",
            ('rl.toml:5: programs.envs.after: no program named "infr"', "did you mean infer?"),
        ),
        ("[programs.t]\ntarget = 't.py'\ngpus = 1.5", ("rl.toml:3: programs.t.gpus 1.5: expected a number", "")),
        ("[programs.t]\ntarget = 't.py'\nkind = 'service'", ("rl.toml: no target is a main", 'target = "train.py"')),
        ("[program.t]\ntarget = 't.py'", ("rl.toml:1: no such table: program", "[programs.NAME]")),
        ("[programs.t]\ncommand = 'a \"b'", ("rl.toml:2: programs.t.command: no closing quotation", "in pairs")),
        ("[programs.t]\ncommand = 3", ("rl.toml:2: programs.t.command: expected a text", "")),
        ("[programs.1t]\ncommand = 'x'", ("rl.toml:1: programs.1t 1t: expected a letter", "")),
        ("programs = 3", ("rl.toml has no programs", "")),
        ("[programs.t\n", ("rl.toml: TOML syntax error", "")),
        ("", ("rl.toml has no programs", "")),
    ],
)
def test_what_is_wrong_in_a_file_has_its_line(run_in_fork, tmp_path, text, expected):
    write_program(tmp_path, "t.py", "open('started', 'w').close()")
    (tmp_path / "rl.toml").write_text(text)
    done = run_in_fork("run", "rl.toml")
    assert (done.returncode, done.stdout) == (2, ""), done
    assert len(done.stderr.splitlines()) <= 3
    for part in expected:
        assert part in done.stderr
    assert not (tmp_path / "started").exists()


def test_files_that_cannot_be_read(run_in_fork, tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"[programs.\xe4]")
    (tmp_path / "large.toml").write_text("#" * (1 << 20) + "\n#")
    (tmp_path / "folder.toml").mkdir()
    expected = {
        "latin.toml": "latin.toml is not UTF-8",
        "large.toml": "large.toml: is too large for a job file",
        "folder.toml": "folder.toml: Is a directory",
        "missing.toml": "missing.toml: No such file or directory",
    }
    for name, text in expected.items():
        done = run_in_fork("run", name)
        assert done.returncode == 2
        assert text in done.stderr


def test_submit_passes_all_programs_on_and_refuses_an_array(run_in_fork, tmp_path):
    write_program(tmp_path, "t.py", "")
    (tmp_path / "rl.toml").write_text(JOB.replace(str(CLIENT), "t.py"))
    line = ("submit", "--scheduler", "slurm", "--dry-run")
    done = run_in_fork(*line, "rl.toml")
    script = done.stdout
    assert script.count("--program=") == 3, done.stderr
    assert "t.py -- 'http://{vllm}' once" in script
    again = run_in_fork("submit", "--command", "sleep", "9", ":", *line[1:], "t.py").stdout
    assert again.count("--program=") == 2
    (tmp_path / "two.toml").write_text((tmp_path / "rl.toml").read_text().replace("ready =", "nodes = 2\nready ="))
    done = run_in_fork(*line, "--nodes", "2", "two.toml")
    assert done.returncode == 2
    assert "the programs need at least 3 nodes, and the job has 2" in done.stderr
    done = run_in_fork("manifest", "--container-image", "i", "--nodes", "3", "two.toml")
    assert "completions: 3" in done.stdout, done.stderr
    assert "the programs need" in run_in_fork("manifest", "--container-image", "i", "two.toml").stderr
    done = run_in_fork(*line, "--array", "0-3", "rl.toml")
    assert done.returncode == 2
    assert "--array 0-3 does not work with several programs" in done.stderr


TRL = """
[programs.vllm]
command = '''vllm serve Qwen/Qwen2.5-7B --tensor-parallel-size 4 --port {port}
             --weight-transfer-config '{"backend": "nccl"}'
             --logprobs-mode processed_logprobs --max-logprobs -1'''
gpus = 4
env = { VLLM_SERVER_DEV_MODE = "1" }
ready = "http:/health"

[programs.trainer]
target = "train.py --vllm_mode server --vllm_server_base_url http://{vllm}"
gpus = 4
"""

EVALUATION = """
[programs.eval]
command = "python eval_server.py --port {port}"
kind = "sidecar"
gpus = 1
nice = 10                                       # its CPU comes second

[programs.trainer]
target = "train.py --eval-url http://{eval}"    # 7 GPUs: the rest
"""


@pytest.mark.parametrize(("text", "shares"), [(TRL, ([0, 1, 2, 3], 4)), (EVALUATION, ([0], 7))])
def test_jobs_as_people_write_them(run_in_fork, tmp_path, fake_nvml, text, shares):
    write_program(tmp_path, "train.py", "")
    for name in ("vllm", "python"):
        write_program(tmp_path, f"bin/{name}", "#!/bin/sh\n").chmod(0o755)
    (tmp_path / "job.toml").write_text(text)
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = run_in_fork("run", "--dry-run", "--json", "job.toml", env={**fake_nvml.environ(8), "PATH": path})
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["programs"][0]["gpus"], plan["world_size"]) == shares
    if text is TRL:
        assert plan["programs"][0]["command"][8:10] == ['{"backend": "nccl"}', "--logprobs-mode"]


PRIME_RL = """
[programs.infer]
command = "uv run inference @ infer.toml --server.host 0.0.0.0 --server.port {port}"     # one on each of its nodes
nodes = 2
gpus = "all"
ready = "http:/health"
ready-timeout = "70m"

[programs.envs]
command = "uv run env-server @ env.toml --serve.address tcp://{address}"
ready = "tcp"
restarts = 5                                    # alone; its clients find it at the same address again

[programs.trainer]
target = "-m prime_rl.train @ train.toml"
nodes = 2
after = []                                      # it loads its model while the servers load theirs

[programs.orchestrator]
command = "uv run orchestrator @ orch.toml --model.client.base-url {infer.all:http://%/v1} --host {trainer.host}"
kind = "main"                                   # done = trainer and orchestrator are done
after = ["infer", "envs"]
"""

DATA = """
[programs.dispatcher]
command = "python -m my_data.dispatcher --port {port}"
nodes = 1
ready = "tcp"

[programs.worker]
command = "python -m my_data.worker --dispatcher {dispatcher} --port {port}"
with = "dispatcher"                             # on that program's nodes
count = 8
after = ["dispatcher"]
restarts = 100

[programs.trainer]
target = "train.py --data {dispatcher}"
nodes = 2
"""

METRICS = """
[programs.tensorboard]
command = "tensorboard --logdir runs --host 127.0.0.1 --port {port}"
kind = "sidecar"

[programs.exporter]
command = "dcgm-exporter --address :{port}"
kind = "sidecar"
each-node = true

[programs.trainer]
target = "train.py"
"""

TWO_WORLDS = """
[programs.teacher]
target = "teacher.py --listen {port} --group-port {port.group}"
kind = "service"
gpus = 4
ready = "line:teacher ready"

[programs.student]
target = "train.py --teacher {teacher} --group {teacher.host}:{teacher.port.group}"
gpus = 4
"""


@pytest.mark.parametrize(
    ("text", "nnodes", "ranks", "programs"),
    [
        (PRIME_RL, 4, 16, {"infer.0": 2, "infer.1": 3, "envs": 0, "orchestrator": 0}),
        (DATA, 3, 16, {"dispatcher": 2, **{f"worker.{number}": 2 for number in range(8)}}),
        (METRICS, 2, 16, {"tensorboard": 0, "exporter.0": 0, "exporter.1": 1}),
        (TWO_WORLDS, 1, 4, {"teacher": 0}),
    ],
)
def test_jobs_of_several_nodes_and_worlds_as_people_write_them(
    run_in_fork, tmp_path, fake_nvml, text, nnodes, ranks, programs
):
    write_program(tmp_path, "train.py", "")
    (tmp_path / "prime_rl").mkdir()
    write_program(tmp_path, "prime_rl/train.py", "")
    for name in ("uv", "python", "tensorboard", "dcgm-exporter"):
        write_program(tmp_path, f"bin/{name}", "#!/bin/sh\n").chmod(0o755)
    (tmp_path / "job.toml").write_text(text)
    where = ("--nnodes", nnodes, "--node-rank", "0", "--master-addr", "127.0.0.1") if nnodes > 1 else ()
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    done = run_in_fork("run", *where, "--dry-run", "--json", "job.toml", env={**fake_nvml.environ(8), "PATH": path})
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["world_size"] == ranks
    assert {each["name"]: each["node"] for each in plan["programs"]} == programs
