"""``ddplaunch run`` as click has it: its help, and what is refused."""

from __future__ import annotations

import os
from itertools import takewhile

import click

from ddplaunch.cli import run as started
from ddplaunch.cli.options import COMMON, LOG_JSON, SECTIONS
from ddplaunch.cli.parameters import PARAMS, read
from ddplaunch.cli.target_command import SETTINGS, TargetCommand, remarks
from ddplaunch.output.voice import VOICE


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

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # An error in these words is to be said in the form that they ask for; what they mean is known only afterwards.
        typed = "--log-json" in takewhile(lambda word: word != "--", args)
        VOICE.for_machines = typed or os.environ.get(LOG_JSON, "0") not in ("", "0")
        return super().parse_args(ctx, args)


@click.command(cls=_RunCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=PARAMS)
def run(**_: object) -> int:
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
    said = remarks()
    return started.run(read(click.get_current_context(), said.from_variables), said)
