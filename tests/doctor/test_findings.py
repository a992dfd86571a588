"""What the facts of one machine mean, by facts made up; that nodes tell such facts is in test_one_machine.py."""

from __future__ import annotations

from dataclasses import replace

from ddplaunch.devices.gpu_health import GpuHealth
from ddplaunch.doctor.comparison import findings
from ddplaunch.doctor.examination import Examination, NodeFound
from ddplaunch.doctor.facts import Torch
from ddplaunch.plan.hardware import LostGpu
from tests.doctor.facts import FACTS

TORCH = Torch("2.13.0", cuda="13.0", nccl="2.28", cuda_works=True, devices=4)


def gpus(*indices):
    return tuple(GpuHealth(index, "H100", "570.86.15", None, None, ()) for index in indices)


def told(*facts):
    nodes = tuple(NodeFound(f"n{node}", each) for node, each in enumerate(facts))
    return [f"{each.severity.value} {each.subject}: {each.text}" for each in findings(Examination(nodes, ()))]


def test_a_sound_machine():
    assert told(FACTS, FACTS) == []


def test_a_lost_gpu_is_the_one_finding():
    """Neither that CUDA does not start without it, nor that other nodes have one more."""
    well = replace(FACTS, torch=TORCH, gpus=gpus(0, 1, 2, 3))
    why_not = "CUDA unknown error"
    lost = replace(well, torch=replace(TORCH, cuda_works=False, devices=0, why_not=why_not), gpus=gpus(0, 2, 3))
    assert told(well, replace(lost, lost_gpus=(LostGpu(1, "GPU is lost"),))) == [
        "error n1 GPU 1: the driver cannot reach it: GPU is lost"
    ]
