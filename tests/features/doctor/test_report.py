"""Tests of the report, and of the findings that each check of a machine yields, with made-up facts."""

import textwrap
from functools import partial

import pytest
from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.features.doctor.checks import Finding, Severity
from ddplaunch.features.doctor.examination import CollectiveResult, DoctorResults, ExaminedNode, PathResult
from ddplaunch.features.doctor.flows import Flow
from ddplaunch.features.doctor.node_facts import JobFolder, ProcessLimits, RouteToNodeZero, TorchInfo
from ddplaunch.features.doctor.report import format_report
from ddplaunch.system.devices.gpu_health import GpuHealth
from ddplaunch.system.plan.hardware import GpuProcess
from tests.features.doctor.facts import FACTS, GIB, describe_findings

MIB = 1 << 20
CUDA = TorchInfo("2.13.0", "13.0", "2.28", 1, ("sm_80", "sm_90a", "compute_70"), ("sm_86",))
GPU = GpuHealth(0, "H100", "570.86", 80 * GIB, 0, ())


def one_gpu(**changes):
    return {"gpus": (replace(GPU, **changes),)}


def built_for(capability, *architectures):
    return {"torch": replace(CUDA, capabilities=(capability,), architectures=architectures)}


def folder(what, free=None, **more):
    return {"folders": (JobFolder(what, 100 * GIB, free, **more),)}


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"torch": None}, "error n0: no torch"),
        ({"torch": None, "torch_error": "OSError: libcudart"}, "error n0: OSError: libcudart"),
        (one_gpu(), "error n0: torch 2.13.0 was built without CUDA, but this machine has 1 GPU"),
        (one_gpu(driver=None), None),  # of another vendor
        ({"torch": replace(CUDA, why_not="driver too old"), **one_gpu()},
         "error n0: torch cannot use CUDA 13.0 with driver 570.86: driver too old"),
        (built_for("sm_86", "sm_80"), None),
        (built_for("sm_80", "sm_80"), None),
        (built_for("sm_80", "sm_86"), "error n0 cuda:0: it is sm_80, but torch 2.13.0 was built for sm_86"),
        (built_for("sm_90", "sm_80", "sm_70"), "error n0 cuda:0: it is sm_90, but torch 2.13.0 was built for sm_80, "),
        (built_for("sm_90", "sm_90a"), None),
        (built_for("sm_120", "compute_90"), None),
        (built_for("sm_90", "compute_90"), None),
        (built_for("sm_80", "compute_90"), "error n0 cuda:0: it is sm_80, but torch 2.13.0 was built for compute_90"),
        (built_for("sm_90", "gfx90a"), None),
        ({"gpus_error": "no driver"}, "error n0: no driver"),
        ({"gpus_error": "no driver", "torch": CUDA, **one_gpu()}, "warning n0: no driver"),
        ({"torch": CUDA, **one_gpu(memory_used=GIB)}, None),
        ({"torch": CUDA, **one_gpu(memory_used=GIB + 1)}, "warning n0 GPU 0: 1.0 GiB of 80.0 GiB are in use, by proc"),
        ({"torch": CUDA, **one_gpu(processes=(GpuProcess(7, "python", "ada", 0),))},
         "warning n0 GPU 0: 0 B of 80.0 GiB are in use, by python 7 of ada"),
        ({"torch": CUDA, **one_gpu(worn_out=True, needs_reset=True)}, "error n0 GPU 0: its memory has broken rows, an"),
        ({"torch": CUDA, **one_gpu(slowed_by=("a", "b"))}, "warning n0 GPU 0: its clock is reduced by a and b"),
        (folder("/dev/shm", GIB), None),
        (folder("/dev/shm", GIB - MIB), "warning n0: /dev/shm has 1023 MiB free of 100.0 GiB; DataLoader workers and "),
        (folder("/dev/shm", 64 * MIB), "error n0: /dev/shm has 64 MiB free of 100.0 GiB; DataLoader workers and NCCL "),
        (folder("TMPDIR", GIB), None),
        (folder("TMPDIR", GIB - MIB), "warning n0: TMPDIR has 1023 MiB free of 100.0 GiB"),
        (folder("TMPDIR", 50 * MIB), "warning n0: TMPDIR has 50 MiB free of 100.0 GiB"),
        (folder("the current folder", 49 * MIB), "error n0: the current folder has 49 MiB free of 100.0 GiB"),
        (folder("the current folder", error="Full"), "warning n0: cannot write to the current folder: Full"),
        (folder("/dev/shm", 0, error="Full"), "error n0: cannot write to /dev/shm: Full"),
        (folder("TMPDIR", silent=True), "error n0: the file system of TMPDIR did not answer within 5 s"),
        ({"cannot_start": ("no /proc", "mount it")}, "error n0: no /proc"),
        ({"limits": ProcessLimits(65536, 1024, 1024, 1024)}, None),
        ({"limits": ProcessLimits(65536, None, None, None), "infiniband": ("mlx5_0",)},
         "warning n0: at most 64 KiB of memory can be locked (ulimit -l); InfiniBand needs unlimited"),
        ({"limits": ProcessLimits(None, 1023, None, None)}, "warning n0: a process may have 1023 open files (ulimit -"),
        ({"limits": ProcessLimits(None, None, 9, None)}, "warning n0: this user may have 9 processes and threads (uli"),
        ({"limits": ProcessLimits(None, None, None, 9)}, "warning n0: the control group allows 9 more processes and t"),
        ({"memory_available": 2 * GIB}, None),
        ({"memory_available": GIB}, "warning n0: 1.0 GiB of memory is available of 16.0 GiB"),
        ({"quota": 1.5}, "note n0: the control group limits CPU time to 1.5 of 2 CPUs"),
        ({"quota": 2.0, "load": 4.0}, None),
    ],
)  # fmt: skip
def test_each_problem_of_a_machine_is_a_finding(changes, finding):
    found = describe_findings(replace(FACTS, **changes))
    assert [each.startswith(finding or "none expected") for each in found] == [True] * bool(finding), found


REPORT = """
    ddplaunch doctor VERSION: n0, n1 and n2, in 62 s

    error    n0: a text that is longer than one line of the report, which has 80
             columns
             -> a hint
    note     n1: short
             -> a hint
    1 error, 1 note.

    memory          16.0 GiB (n1); 32.0 GiB (n0)
      available     8.0 GiB
    free: /dev/shm  8.0 GiB
    Python          3.11.7 (n0); 3.11.9 (n1)
    torch           2.13.0, CUDA 13.0, NCCL 2.28 (n0); 2.13.0 (n1)
    GPUs            1 H100, driver 570.86 (n0); none (n1)
    degrees C       50
    Linux           6.18
    CPUs            2 (n0); 2, limited to the time of 1.5 (n1)
    limits          open files unlimited, processes unlimited, locked memory
                    unlimited
    InfiniBand      mlx5_0
    address         10.0.0.1 (n0); 10.0.0.2 (n1)
    interface       eth0, MTU 1500, 10000 Mbit/s (n0); no interface, MTU unknown
                    (n1)
    clock           synchronised (NTP) (n0); not synchronised (no NTP) (n1)
                    compared with n0: n1 +0.250 s

    connectivity matrix, ports 29500, 29501 and a random one
      from                  n0        n1        n2
      n0                     -    silent         ?
      n1                 lossy         -         ?
      n2                     ?         ?         -
      round-trip time: 0.1 ms to 0.2 ms
      throughput: 800 Mbit/s

    all_reduce, bus bandwidth
                                  4 B takes        1 MiB       16 MiB
      n0 alone, 2 ranks (gloo)       100 us   1000 MiB/s    1.6 GiB/s
      n1 alone, 2 ranks (gloo)  failed: broken pipe
      n0 and n1 (gloo)               100 us   1000 MiB/s     too slow

    all nodes at once, 3 ranks
                               4 B takes   bus bandwidth
      all_reduce (gloo)           100 us   853 MiB/s at 64 MiB
      n0, all_gather (nccl)       100 us   too slow
      all_to_all (gloo)       not with gloo of this torch
      reduce_scatter (gloo)   failed: timed out
"""


def test_the_report_of_three_nodes():
    link = RouteToNodeZero("10.0.0.1", "eth0", 1500, 10000)
    changes = {**folder("/dev/shm", 8 * GIB), **one_gpu(temperature=50), "memory_total": 32 * GIB}
    first = replace(FACTS, torch=CUDA, link=link, infiniband=("mlx5_0",), **changes)
    link = RouteToNodeZero("10.0.0.2", None)
    second = replace(FACTS, quota=1.5, clock_synchronised=False, python="3.11.9", link=link)
    nodes = ExaminedNode("n0", replace(first, clock_synchronised=True)), ExaminedNode("n1", second, clock=0.25)
    ways = PathResult(0, 1, 29500, "ok", 1e-4), PathResult(0, 1, 0, "silent", None), PathResult(1, 0, 0, "ok", 1e-4)
    flows = Flow(1, 0, 1000, 2e-4, 300, 40), Flow(0, 1, 1000, 1e-4, 300, 0, True, 1e8)
    measured = partial(CollectiveResult, backend="gloo")
    speeds = (measured((0, 1), 2, seconds=(1e-4, 1e-3)), measured((0,), 2, seconds=(1e-4, 1e-3, 1e-2)),
              measured((1,), 2, error="broken pipe"))  # fmt: skip
    together = (measured((0, 1), 3, seconds=(1e-4, 1e-3, 1e-2, 1e-1)),
                measured((0,), 3, backend="nccl", seconds=(1e-4,), name="all_gather"),
                measured((0, 1), 3, error="gloo does not support it", name="all_to_all"),
                measured((0, 1), 3, error="timed out", name="reduce_scatter"))  # fmt: skip
    lost = ExaminedNode("n2", trouble="its connection closed")
    found = DoctorResults((*nodes, lost), (29500, 29501), ways, flows, (), speeds, together)
    long = "a text that is longer than one line of the report, which has 80 columns"
    findings = [Finding(Severity.ERROR, "n0", long, "a hint"), Finding(Severity.NOTE, "n1", "short", "a hint")]
    assert format_report(found, findings, 61.7).replace(__version__, "VERSION") == textwrap.dedent(REPORT)[1:]


def test_the_report_of_many_nodes_has_no_matrix_and_only_the_slowest_pairs():
    nodes = tuple(ExaminedNode(f"n{node}") for node in range(9))
    ways = tuple(PathResult(0, node, 0, "silent" if node == 8 else "ok", None) for node in range(1, 9))
    speeds = tuple(CollectiveResult((0, node), 2, "gloo", (1e-4, node * 1e-3)) for node in (*range(1, 9), *range(1, 6)))
    lines = format_report(DoctorResults(nodes, (29500,), ways, speeds=speeds), (), 1).splitlines()
    assert lines[0].endswith(": n0, n1, n2, n3, n4 and 4 more, in 1 s")
    assert lines[2:5] == [
        "No problems found.",
        "",
        "connectivity: 7 of 8 connections succeed on ports 29500 and a random one",
    ]
    assert lines[6] == "all_reduce, bus bandwidth; the 12 slowest of 13"
    assert (len(lines), lines[8].split()[:3]) == (20, ["n0", "and", "n8"])
