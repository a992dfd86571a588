"""``ddplaunch devices``: what this machine has, who uses it, and what a job would see of it."""

from __future__ import annotations

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
def devices(as_json: bool) -> None:
    """Show the GPUs and CPUs of this machine.

    Lists every GPU with its torch name, memory, NUMA node and users, and says which of them a job would see
    (CUDA_VISIBLE_DEVICES and the like are respected). The index, the UUID or the beginning of a UUID is what
    `run --gpus` takes.
    """
    import json
    import os
    import sys

    from ddplaunch.commands.devices.table import devices_json, render_devices
    from ddplaunch.dataclass import replace
    from ddplaunch.devices import read_hardware
    from ddplaunch.devices.given import claim
    from ddplaunch.devices.visible import visible_gpus

    hardware = read_hardware(processes=True)
    visible = visible_gpus(hardware, None, os.environ)
    if as_json:
        click.echo(json.dumps(devices_json(hardware, visible), indent=2))
    else:
        hardware = replace(hardware, failed=claim(hardware, visible, os.environ))
        render_devices(hardware, visible, sys.stdout)
