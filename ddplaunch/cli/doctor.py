"""``ddplaunch doctor``: what would break a job on these machines, or slow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddplaunch.doctor.session import Reach
    from ddplaunch.ssh.hosts import Host

HEARTBEAT = 60.0  # seconds of silence after which ssh gives a host up


@click.command()
@click.option("--hosts", metavar="HOSTS", help="Look at these hosts, over SSH: n1,n2 or n[1-4].")
@click.option("--hostfile", metavar="FILE", help="Look at the hosts in this file, one a line.")
@click.option("--include", metavar="HOSTS", help="Look only at these of the hosts.")
@click.option("--exclude", metavar="HOSTS", help="Leave out these hosts.")
@click.option("--remote-python", metavar="PATH", help="The Python on the hosts.  [default: the path of this one]")
@click.option("--master-addr", metavar="ADDRESS", help="The address of the first host, as the others reach it.")
@click.option(
    "--master-port",
    type=click.IntRange(1, 65534),
    default=29500,
    show_default=True,
    metavar="PORT",
    help="Try this port, the next one, and one that the kernel chooses.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with stable field names.")
def doctor(
    hosts: str | None,
    hostfile: str | None,
    include: str | None,
    exclude: str | None,
    remote_python: str | None,
    master_addr: str | None,
    master_port: int,
    as_json: bool,
) -> int:
    """Look for what would break or slow a job: on this machine, on hosts, or on the nodes of a Slurm job.

    Looks at versions, GPUs, shared memory, disks, limits and clocks; tries the ways between nodes; and measures a small
    all_reduce. It changes nothing, and takes half a minute. The exit code is 1 where something would break a job.
    """
    import json
    import os
    import sys
    import time

    from ddplaunch.cli.over_ssh import carried
    from ddplaunch.cli.say import say_note
    from ddplaunch.console.doctor import page, to_json
    from ddplaunch.doctor.comparison import findings
    from ddplaunch.doctor.examination import Examiner
    from ddplaunch.doctor.findings import Severity
    from ddplaunch.ssh.fleet import make_room
    from ddplaunch.ssh.hosts import read

    began = time.monotonic()
    environ = carried((), os.environ)
    if hosts is None and hostfile is None:
        for name, value in (("include", include), ("exclude", exclude), ("remote-python", remote_python)):
            if value is not None:
                raise UsageError(f"--{name} works only with --hosts or --hostfile", "--hosts n1,n2")
        address, reaches = _in_slurm() or _here()
    else:
        named = read(hosts, hostfile, include, exclude)
        address, reaches = _over_ssh(named, remote_python or sys.executable, environ)
    if master_addr is not None and len(reaches) < 2:
        raise UsageError("--master-addr works only with several nodes", "--hosts n1,n2")
    make_room(len(reaches))
    address = (master_addr or address) if len(reaches) > 1 else ""
    ports = (master_port, master_port + 1) if len(reaches) > 1 else ()
    found = Examiner(reaches, address, ports, environ, say_note).examine()
    wrong = findings(found)
    if as_json:
        click.echo(json.dumps(to_json(found, wrong), indent=2))
    else:
        click.echo(page(found, wrong, time.monotonic() - began), nl=False)
    return int(any(each.severity is Severity.ERROR for each in wrong))


def _here() -> tuple[str, list[Reach]]:
    import os
    import sys

    from ddplaunch.doctor.session import Reach
    from ddplaunch.plan.command import DOCTOR, python_command

    return "", [Reach(os.uname().nodename, tuple(python_command(sys.executable, DOCTOR)))]


def _over_ssh(hosts: Sequence[Host], python: str, environ: Mapping[str, str]) -> tuple[str, list[Reach]]:
    """The address of the first host, and how all are reached."""
    from ddplaunch.doctor.session import Reach
    from ddplaunch.plan.command import DOCTOR
    from ddplaunch.ssh.client import command, look_up

    ways = [look_up(host.destination) for host in hosts]
    return ways[0].address, [
        Reach(
            host.name,
            tuple(command(host.destination, way, python, environ, HEARTBEAT, DOCTOR)),
            f"ssh {host.destination} true",
        )
        for host, way in zip(hosts, ways, strict=True)
    ]


def _in_slurm() -> tuple[str, list[Reach]] | None:
    """The nodes of the Slurm job that we are in, each reached by a step of its own; None outside of one."""
    import os
    import sys

    from ddplaunch.clusters import slurm
    from ddplaunch.doctor.session import Reach
    from ddplaunch.plan.command import DOCTOR, python_command

    allocation = slurm.allocation(os.environ)
    if allocation is None or len(allocation.hosts) < 2:
        return None
    step = os.environ.get(slurm.STEP_ID, "")
    if step.isdigit() and int(step) < slurm.SPECIAL_STEPS:
        raise UsageError(
            "ddplaunch doctor starts a step on each node itself, and this is one already (srun)",
            "type it without srun, in the batch script or in the shell that salloc opens",
        )
    words = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--quiet")
    python = python_command(sys.executable, DOCTOR)
    return allocation.hosts[0], [
        Reach(host, (*words, f"--nodelist={host}", *python), f"srun --overlap --nodelist={host} true")
        for host in allocation.hosts
    ]
