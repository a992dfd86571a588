"""``ddplaunch run`` as click has it, for its help and for completion; ``reader`` reads it."""

from __future__ import annotations

import click

from ddplaunch.cli.options import COMMON, SECTIONS
from ddplaunch.cli.parameters import PARAMS
from ddplaunch.cli.target_command import SETTINGS, TargetCommand


class _RunCommand(TargetCommand):
    sections = SECTIONS
    common = COMMON
    examples = (
        ("4 ranks on this machine", "ddplaunch run --nproc 4 train.py --lr 0.1"),
        ("a function, called in each rank; one rank for each GPU", "ddplaunch run train.py:main --lr 0.1"),
        (
            "2 machines; type the same on the other one, with --node-rank 1",
            "ddplaunch run --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 train.py",
        ),
        ("2 hosts by SSH, 4 ranks on each", "ddplaunch run --hosts n1:4,n2:4 train.py"),
        ("print what would run where; start nothing", "ddplaunch run --dry-run --nproc 4 train.py"),
    )


@click.command(cls=_RunCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=PARAMS)
def run(**_: object) -> None:
    """Start a training job on this machine, or this machine's share of one.

    \b
    TARGET is one of
      train.py                  a script, as for `python train.py`
      train.py:main             a function in a file, called in each rank
      package.module:function   a function in a module
      -m package.module         a module, as for `python -m package.module`
      --no-python ./program     any program

    Options come before TARGET, and arguments of the target after it. Directly after TARGET, --nproc, --nnodes,
    --node-rank, --master-addr, --master-port and --dry-run are still options of ddplaunch.

    A function gets rank, local_rank, world_size, device and the like by the names of its parameters, the others
    from its arguments: --lr 0.1. Options of torchrun work too: docs/torchrun.md.
    """
