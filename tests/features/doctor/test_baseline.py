"""Tests of ``ddplaunch doctor --save`` and ``--compare``: what became slower is reported, and noise is not."""

import itertools
import random

import pytest
from msgspec.structs import replace

from ddplaunch.features.doctor.baseline import Baseline, find_slower_than_baseline, list_measurements
from ddplaunch.features.doctor.examination import CollectiveResult, DeviceResult, DoctorResults, ExaminedNode
from tests.features.doctor.facts import FACTS

HOSTS = [f"n{node}" for node in range(4)]


def examined(*, backend="nccl", factor=lambda what, nodes: 1.0):
    """Four nodes, each figure of which is that many times worse."""
    pairs = list(itertools.combinations(range(4), 2))
    return DoctorResults(
        tuple(ExaminedNode(name) for name in HOSTS),
        (29500, 29501),
        powers=tuple(DeviceResult(node, "cuda:0", 5e14 / factor("power", (node,))) for node in range(4)),
        speeds=tuple(
            CollectiveResult(pair, 2, backend, (2e-5 * factor("latency", pair), 1e-3, 1e-2 * factor("bandwidth", pair)))
            for pair in pairs
        ),
    )


def describe_findings(now, then):
    saved = Baseline("0.1.0", "2026-11-17 10:00", tuple(HOSTS), tuple(list_measurements(then)))
    return [f"{each.severity.value} {each.subject}: {each.text}" for each in find_slower_than_baseline(now, saved)]


@pytest.mark.parametrize(("backend", "noise"), [("nccl", 1.1), ("gloo", 1.5)])
def test_noise_is_not_named(backend, noise):
    draw = random.Random(1)

    def factor(what, nodes):
        return draw.uniform(1 / noise, noise) if what in ("latency", "bandwidth") else draw.uniform(0.95, 1.05)

    for _ in range(20):
        now, then = (examined(backend=backend, factor=factor) for _ in range(2))
        assert describe_findings(now, then) == []


ON_DATE = "on 2026-11-17 10:00"


@pytest.mark.parametrize(
    ("slower", "findings"),
    [
        ({("bandwidth", pair): 2.0 for pair in itertools.combinations(range(4), 2) if 2 in pair},
         [f"warning n2: all_reduce (nccl) with any other node: 800 MiB/s; it was 1.6 GiB/s {ON_DATE}"]),
        ({("bandwidth", (1, 3)): 2.0, ("power", (0,)): 1.5},
         [f"warning n1 and n3: all_reduce (nccl): 800 MiB/s; it was 1.6 GiB/s {ON_DATE}",
          f"warning n0: matrices on cuda:0: 333 TFLOP/s; it was 500 TFLOP/s {ON_DATE}"]),
    ],
)  # fmt: skip
def test_slower_measurements_are_named_with_both_values(slower, findings):
    now = examined(factor=lambda what, nodes: slower.get((what, nodes), 1.0))
    assert describe_findings(now, examined()) == findings
    assert describe_findings(examined(), now) == [], "faster than before"


def test_a_busy_node_is_not_compared():
    now = examined(factor=lambda what, nodes: 9.0 if 2 in nodes else 1.0)
    nodes = (*now.nodes[:2], ExaminedNode("n2", replace(FACTS, load=25.0)), now.nodes[3])
    assert describe_findings(replace(now, nodes=nodes), examined()) == [
        "note n2: not compared with 2026-11-17 10:00: its CPUs are busy"
    ]


def test_a_file_of_other_hosts():
    other = DoctorResults((ExaminedNode("m0"),), (), powers=(DeviceResult(0, "cpu", 1e9),))
    assert describe_findings(other, examined()) == [
        "note --compare: no measurement in common with 2026-11-17 10:00, on n0, n1, n2, n3"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "\0\xff",
        '{"ddplaunch": "1", "date": "x", "hosts": ["a"], "figures": [{"what": "x", "hosts": [], "unit": "m"}]}',
        '{"ddplaunch": "1", "date": "x", "hosts": ["a"], "figures": '
        '[{"what": "x", "hosts": [], "unit": "s", "value": 0}]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_refused(run_in_fork, tmp_path, text):
    (tmp_path / "saved").write_text(text, encoding="latin-1")
    done = run_in_fork("doctor", "--compare", "saved")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "Error: --compare saved: not a file written by ddplaunch doctor --save\n  write a new one with --save\n"
    )


def test_files_that_cannot_be_read_or_written(run_in_fork, tmp_path):
    done = run_in_fork("doctor", "--compare", "nowhere")
    assert done.stderr.startswith("Error: --compare nowhere: No such file or directory\n")
    done = run_in_fork("doctor", "--save", "nowhere/saved")
    assert done.stderr.startswith("Error: --save nowhere/saved: No such file or directory\n")
    (tmp_path / "link").symlink_to("saved")
    assert run_in_fork("doctor", "--save", "link").returncode == 2
