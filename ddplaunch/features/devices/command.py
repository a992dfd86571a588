"""``ddplaunch devices``: lists the CPUs and GPUs of this machine, their users, and which GPUs a job would see.

As a table in a terminal, as plain lines in a pipe, or as one JSON object.
"""

from __future__ import annotations

import json
import os
import sys

import click
from msgspec.structs import replace

from ddplaunch.base.types import JsonObject, as_dict
from ddplaunch.features.devices.device_text import format_plain, torch_names
from ddplaunch.system.devices import read_hardware
from ddplaunch.system.devices.machine import gpu_evidence
from ddplaunch.system.devices.vendor import VisibleGpus
from ddplaunch.system.devices.visible_gpus import visible_gpus
from ddplaunch.system.plan.hardware import Cpu, Gpu, Hardware, MigInstance, explain_shared_mig
from ddplaunch.system.plan.numbers import format_cpulist
from ddplaunch.system.plan.planner import PlanSpec


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
def devices(as_json: bool) -> None:
    """List the GPUs and CPUs of this machine.

    Shows the torch name, memory, NUMA node and users of every GPU, and which GPUs a job would see (respects
    CUDA_VISIBLE_DEVICES and the like). `run --gpus` takes the index, the UUID or the beginning of a UUID.
    """
    hardware = read_hardware(processes=True)
    visible = visible_gpus(hardware, None, os.environ)
    visible = replace(visible, notes=(*visible.notes, *_mig_notes(visible)))
    if as_json:
        return click.echo(json.dumps(devices_json(hardware, visible), indent=2))
    hardware = replace(hardware, gpu_evidence=gpu_evidence(hardware, visible, os.environ, PlanSpec()))
    if sys.stdout.isatty():
        from ddplaunch.features.devices.device_table import write_table

        write_table(hardware, visible)
    else:
        click.echo(format_plain(hardware, visible), nl=False)


def devices_json(hardware: Hardware, visible: VisibleGpus) -> JsonObject:
    """Return the devices as JSON types: sizes are bytes, CPU sets kernel lists ("0-3,8"), null is unknown.

    ``device`` is torch's name of a GPU or MIG instance, null where a job does not see it.
    """
    names = torch_names(visible)
    return {
        "cpu": _cpu_json(hardware.cpu),
        "gpus": [_gpu_json(gpu, names) for gpu in hardware.gpus],
        "visible": {
            "source": visible.source,
            "devices": [
                {"device": name, "gpu": device.gpu.index, "vendor": device.gpu.vendor, "token": device.token}
                for name, device in zip(visible.devices, visible.gpus, strict=True)
            ],
        },
        "notes": [*hardware.notes, *visible.notes],
    }


def _mig_notes(visible: VisibleGpus) -> tuple[str, ...]:
    """Return a note on what NCCL needs if a job sees several MIG instances of one GPU."""
    divided = [each.gpu.index for each in visible.gpus if each.mig]
    shared = next((gpu for gpu in divided if divided.count(gpu) > 1), None)
    if shared is None or not (why := explain_shared_mig(os.environ)):
        return ()
    return (f"A job sees {divided.count(shared)} MIG instances of GPU {shared}: {why}.",)


def _cpu_json(cpu: Cpu) -> JsonObject:
    first = ("name", "logical", "physical", "allowed", "quota", "memory_total", "memory_available")
    fields = {**dict.fromkeys(first), **as_dict(cpu), "allowed": format_cpulist(cpu.allowed)}
    return {**fields, "numa": [{**as_dict(node), "cpus": format_cpulist(node.cpus)} for node in cpu.numa]}


def _gpu_json(gpu: Gpu, names: dict[tuple[Gpu, MigInstance | None], str]) -> JsonObject:
    fields = {**dict.fromkeys(("vendor", "index", "device", "name", "uuid", "pci", "driver")), **as_dict(gpu)}
    fields |= {"device": names.get((gpu, None)), "cpus": format_cpulist(gpu.cpus) or None}
    mig = [{"uuid": mig.uuid, "device": names.get((gpu, mig)), **as_dict(mig)} for mig in gpu.mig]
    return {**fields, "mig": mig, "processes": [as_dict(process) for process in gpu.processes]}
