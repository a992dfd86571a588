"""Tests of the dry run: the same facts as a table, as text and as JSON, and commands that can be planned again."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest

from tests.conftest import clean_environment, ddplaunch_command, run_in_terminal, write_program
from tests.fake_nvml import fake_nvml as fake_nvml


@pytest.fixture
def plan(run_in_fork, tmp_path):
    """Run a dry run with ``--json`` and return its object."""
    write_program(tmp_path, "train.py", "open('ran', 'w').close()\n")

    def run(line: str, **options: object):
        done = run_in_fork("run", "--dry-run", "--json", *shlex.split(line), **options)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "ran").exists()
        return json.loads(done.stdout)

    return run


def test_what_is_detected_and_what_is_assumed(plan, fake_nvml):
    gpus = fake_nvml.environ(4, cpus="0;0;0;0")
    made = plan("--nnodes 2 train.py", env=gpus)
    assert [node["source"] for node in made["nodes"]] == ["4 GPUs found", "assumed"]
    sources = {fact["name"]: fact["source"] for fact in made["facts"]}
    assert sources["devices"] == "NVML"
    assert sources["node rank"] == sources["master port"] == "assumed"
    chosen = plan("--gpus 2,3 --bind numa train.py", env=gpus)
    assert [rank["device"] for rank in chosen["ranks"]] == ["cuda:0", "cuda:1"]
    assert [rank["cpus"] for rank in chosen["ranks"]] == [[0], [0]]
    assert {fact["name"]: fact["source"] for fact in chosen["facts"]}["devices"] == "--gpus"
    for rank in chosen["ranks"]:
        assert rank["env"]["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert rank["env"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert [rank["device"] for rank in plan("--nproc 2 train.py")["ranks"]] == ["cpu", "cpu"]


def test_the_domain_of_this_node(plan, fake_nvml):
    gpus = fake_nvml.environ(2, fabrics=";".join(["c0ffee00111122223333444455556666:7:3"] * 2))

    def domain(line, env):
        return [(fact["value"], fact["source"]) for fact in plan(line, env=env)["facts"] if fact["name"] == "domain"]

    assert domain("--nnodes 2 train.py", gpus) == [("c0ffee00-1111-2222-3333-444455556666.7", "NVLink")]
    assert domain("--nnodes 2 --domain rack-7 train.py", gpus) == [("rack-7", "--domain")]
    assert domain("--nnodes 2 train.py", fake_nvml.environ(2)) == []
    assert domain("train.py", gpus) == []


PLAIN = re.compile(r"rank (\d+) +node (\d+) +host (\S+) +local rank (\d+) +device (\S+) +cpus (\S+)")


@pytest.mark.parametrize("line", ["--nproc 3 train.py", "--nnodes 2 --nproc 2,1 --bind numa train.py --lr 1 'a b'"])
def test_plain_text_has_the_values_of_the_json_plan(plan, run_in_fork, line):
    made = plan(line)
    done = run_in_fork("run", "--dry-run", *shlex.split(line))
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    found = PLAIN.findall(done.stdout)
    assert [[int(row[0]), int(row[1]), row[2], int(row[3]), row[4]] for row in found] == [
        [rank["rank"], rank["node_rank"], rank["host"] or "?", rank["local_rank"], rank["device"]]
        for rank in made["ranks"]
    ]
    for fact in made["facts"]:
        assert f"{fact['name']}: {fact['value']} ({fact['source']})\n" in done.stdout
    shown = dict(word.split("=", 1) for word in re.search("variables of every rank: (.*)", done.stdout)[1].split())
    own = re.search("variables of its own: (.*)", done.stdout)[1].split()
    for rank in made["ranks"]:
        assert {name: value for name, value in rank["env"].items() if name not in (*own, "TORCHELASTIC_RUN_ID")} == {
            name: value for name, value in shown.items() if name != "TORCHELASTIC_RUN_ID"
        }
    for note in made["notes"]:
        assert f"note: {note}\n" in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes 2 --nproc 2 train.py",
        "--nnodes 3 --nproc 2,1,3 --node-rank 1 --master-addr 10.0.0.1 --master-port 1234 train.py data --lr 0.1",
        "--nnodes 2 --nproc 2 --bind numa --grace 2.5 --log-dir 'a b' --show 0,3 --stdin 0 train.py -- --nproc 'x y'",
        "--nnodes 2 --node-rank 1 --init-method tcp://10.0.0.1:99 --nproc 1 -m pkg.mod --x=1 -- y",
        "--nnodes 2 --nproc 1 --backend gloo --max-restarts 2 --control none fn.py:main --steps 3",
        "--nnodes 2 --nproc 1 --no-python ./prog -x",
        "--nnodes 2 --nproc 1 -- -odd.py --nproc 3",
        "--nnodes 2 --nproc 1 --prefix=--{rank} train.py",
        "--nnodes 2 --nproc-per-node 1 --log-line-prefix-template='--${rank}' train.py",
    ],
)
def test_the_commands_for_other_nodes_plan_the_same_job(plan, run_in_fork, tmp_path, line):
    write_program(tmp_path, "pkg/mod.py", "")
    write_program(tmp_path, "fn.py", "def main(steps: int): pass\n")
    write_program(tmp_path, "prog", "#!/bin/sh\n").chmod(0o755)
    write_program(tmp_path, "-odd.py", "")
    made = plan(line)
    text = run_in_fork("run", "--dry-run", *shlex.split(line)).stdout
    commands = dict(re.findall(r"^node (\d+): ddplaunch run (.*)$", text, re.MULTILINE))
    here = made["node_rank"]
    assert sorted(map(int, commands)) == [node for node in range(made["nnodes"]) if node != here]

    def comparable(made):
        ranks = [{**rank, "host": None, "env": {**rank["env"], "TORCHELASTIC_RUN_ID": ""}} for rank in made["ranks"]]
        return ranks, [node["local_world_size"] for node in made["nodes"]], made["backend"], made["target"]

    for node_rank, words in commands.items():
        again = plan(words)
        assert again["node_rank"] == int(node_rank)
        assert comparable(again) == comparable(made)
        assert next(fact for fact in again["facts"] if fact["name"] == "node rank")["source"] == "--node-rank"


@pytest.mark.parametrize("columns", [80, 160])
def test_a_terminal_gets_a_table(tmp_path, columns):
    write_program(tmp_path, "train.py", "")
    words = ddplaunch_command("run", "--dry-run", "--nnodes", "2", "--nproc", "2,1", "train.py", "--lr", "1")
    text = run_in_terminal(words, tmp_path, columns=columns)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert text != plain, "there is colour"
    assert plain.startswith("3 ranks on 2 nodes: python train.py --lr 1\n")
    header, *rows = plain[plain.index("  rank ") :].splitlines()[:4]
    assert header.split() == ["rank", "node", "local", "host", "device", "cpus"]
    assert [row.split()[:3] for row in rows] == [["0", "0", "0"], ["1", "0", "1"], ["2", "1", "0"]]
    (typed,) = [line for line in plain.splitlines() if line.startswith("ddplaunch run")]
    assert typed.endswith("train.py -- --lr 1"), "one line, so that it can be copied"
    others = [line for line in plain.splitlines() if line != typed]
    assert max(map(len, others)) <= columns


def test_no_color(tmp_path):
    write_program(tmp_path, "train.py", "")
    assert "\x1b[3" not in run_in_terminal(
        ddplaunch_command("run", "--dry-run", "train.py"), tmp_path, {"NO_COLOR": "1"}
    )
    assert "\x1b[3" in run_in_terminal(ddplaunch_command("run", "no.py"), tmp_path)
    assert "\x1b" not in run_in_terminal(ddplaunch_command("run", "no.py"), tmp_path, {"TERM": "dumb"})


def test_a_table_of_a_thousand_nodes_leaves_out_most(tmp_path):
    write_program(tmp_path, "train.py", "")
    words = ddplaunch_command("run", "--dry-run", "--nnodes", "1000", "--nproc", "8", "train.py")
    text = run_in_terminal(words, tmp_path, columns=100)
    assert "and 7936 more" in text
    assert len(text.splitlines()) < 150


def test_a_reader_that_leaves_early(tmp_path):
    write_program(tmp_path, "train.py", "")
    with subprocess.Popen(
        ddplaunch_command("run", "--dry-run", "--json", "--nnodes", "1000", "--nproc", "8", "train.py"),
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(10) == b'{"run_id":'
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_the_other_nodes_get_the_words_that_were_typed(run_in_fork, tmp_path):
    """The words are printed as a user can type them: a signal by its name."""
    write_program(tmp_path, "train.py", "")
    typed = "--role trainer --grace 20 --preempt-signal USR1 --preempt-forward XCPU --show all,local:1/none"
    place = "--nnodes 2 --master-addr n0 --master-port 4000 --nproc 2"
    done = run_in_fork("run", "--dry-run", *place.split(), "--node-rank", "0", *typed.split(), "train.py")
    other = done.stdout.splitlines()[-1].partition("ddplaunch run ")[2]
    assert sorted(other.split()) == sorted(f"{place} --node-rank 1 {typed} train.py".split())
    assert run_in_fork("run", "--dry-run", *other.split()).returncode == 0


def test_sidecars_are_shown_on_node_0(plan, run_in_fork):
    """Node 0 has a note, and each node's command the option; the other nodes do not run the sidecar."""
    line = ("--nnodes", "2", "--nproc", "1", "--master-addr", "127.0.0.1", "--sidecar", "sh -c 'a b; c'")
    twice = (*line, "--sidecar", "sleep 9", "train.py")
    sidecars = ["sidecar on node 0: sh -c 'a b; c'", "sidecar on node 0: sleep 9"]
    notes = plan(shlex.join(["--node-rank", "0", *twice]))["notes"]
    assert [note for note in notes if "sidecar" in note] == sidecars
    assert not any("sidecar" in note for note in plan(shlex.join(["--node-rank", "1", *twice]))["notes"])
    done = run_in_fork("run", "--dry-run", "--node-rank", "1", *twice)
    (other,) = (line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("node 0: "))
    again = plan(shlex.join(shlex.split(other)[2:]))["notes"]
    assert [note for note in again if "sidecar" in note] == sidecars
