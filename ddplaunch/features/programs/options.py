"""The options of programs beside the ranks: ``--sidecar``, ``--tensorboard`` and ``--program``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options
from ddplaunch.core.option_values import check_commands, time_limit

# With two or three lines for an option, a group can be seen at once.
# fmt: off


class ProgramOptions(OptionGroup, frozen=True):
    """Programs that run alongside the ranks."""

    heading = "Sidecars, notifications and metrics"
    after = "preempt_forward"

    tensorboard: Annotated[str | None, Option("--tensorboard DIR",
        "Run TensorBoard on DIR while the job runs, and print its URL.", completion="folder")] = None
    sidecar: Annotated[tuple[str, ...], Option("--sidecar COMMAND",
        "Run a program on node 0 while the job runs; may be repeated.", check_commands)] = ()

    program: Annotated[tuple[str, ...], Option("--program JSON",
        "Another program of the job, as `:` between programs writes it; may be repeated.",
        has_variable=False)] = ()

    services: Annotated[str | None, Option("--services RUN",
        "Give this job the addresses of the programs of a run of this machine.")] = None
    mains_timeout: Annotated[float | None, Option("--mains-timeout TIME",
        "Stop a job of several programs if a main runs this much longer than another.", time_limit)] = None

    def check_contradictions(self, options: Options) -> None:
        if self.mains_timeout is not None and not self.program:
            what = f"--mains-timeout {self.mains_timeout:g} works only with several programs"
            raise UsageError(what, "--timeout limits the whole job")

    @property
    def are_used(self) -> bool:
        return bool(self.sidecar or self.program) or self.tensorboard is not None
