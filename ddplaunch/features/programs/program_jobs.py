"""What each program of one node is started with: its words, variables, GPUs and ports."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from ddplaunch.base.options import Options
from ddplaunch.core.events import ProgramPlanned
from ddplaunch.core.feature import FeatureContext
from ddplaunch.core.option_values import MAX_NAME
from ddplaunch.core.options import RanksPerNode
from ddplaunch.core.rank.zygote_messages import ProgramJob, RankJob
from ddplaunch.features.programs.addresses import WORLD_CONTROL_PORT, WORLD_PORT, ProgramAddresses
from ddplaunch.features.programs.gpus import divide_gpus, format_gpus, gpu_variables
from ddplaunch.features.programs.machine import Gate
from ddplaunch.features.programs.placement import Instance, Placement, place_programs
from ddplaunch.features.programs.spec import Programs, ProgramSpec
from ddplaunch.system.devices import read_hardware

PROGRAM_VARIABLE = "DDPLAUNCH_PROGRAM"
RANK_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""Variables of a rank, which a program must not inherit from one: it would take itself for a rank."""


class ProgramJobs:
    """Builds what each program of one node is started with: its words, variables, GPUs and ports."""

    def __init__(self, context: FeatureContext, programs: Programs | None, sidecars: Sequence[ProgramSpec]) -> None:
        """``programs``: None where there are only sidecars, of ``--sidecar`` and ``--tensorboard``."""
        plan, self._programs, self._environ = context.plan, programs, context.tree.environ
        self._node, self.addresses = plan.node_rank, None
        self._instances: list[Instance] = []
        self.gate = Gate((), os.path.basename(plan.target.text))
        self.has_ranks, self.run_id = True, plan.run_id
        self._placement: Placement | None = None
        self.elsewhere: dict[str, ProgramSpec] = {}  # on other nodes
        self.has_own_terminal = not context.config.screen.quiet_s  # not one that it shares with other nodes
        if programs:
            placement = self._placement = place_programs(programs, context.job_config.max_nodes)
            self._instances = placement.on(self._node)
            self.has_ranks = self._node < placement.nodes_with_ranks
            self.elsewhere = {each.spec.name: each.spec for each in placement.instances if each.node != self._node}
            # Where nodes are started together, node 0 names all that the job waits for, for the others too.
            names_all = self._node == 0 or self.has_own_terminal
            elsewhere = tuple(name for name in placement.gate if name in self.elsewhere and names_all)
            self.gate = Gate(placement.gate, programs.target.name, elsewhere)
            self.addresses = ProgramAddresses(programs, placement, self._node, plan.target.args)
        self.specs = (*(each.spec for each in self._instances), *sidecars)
        self._gpu_variables: dict[str, Mapping[str, str]] = {}

    def plan_programs(self, options: Options) -> Iterator[ProgramPlanned]:
        """Assign each program its GPUs, which the plan of the ranks leaves out (``Feature.adjust_spec``); done once."""
        if self._programs is None or self.addresses is None or self._gpu_variables:
            return
        hardware, target = read_hardware(), self._programs.target if self.has_ranks else None
        specs = [each.spec for each in self._instances]
        division = divide_gpus(specs, target, options[RanksPerNode].gpus, hardware, self._environ)
        for spec in specs:
            indices = division.by_program.get(spec.name, ())
            self._gpu_variables[spec.name] = gpu_variables(hardware, indices, self._environ)
            yield ProgramPlanned(spec.name, spec.kind, format_gpus(indices), self.addresses.format_address(spec.name))

    def plan_programs_elsewhere(self) -> Iterator[ProgramPlanned]:
        """On node 0, yield the programs of other nodes, which `ps` and the report of the run show."""
        for name, spec in self.elsewhere.items() if self._node == 0 else ():
            yield ProgramPlanned(name, spec.kind, "", self.addresses.format_address(name) if self.addresses else "")

    def environment(self) -> dict[str, str]:
        """Return the launcher's variables without those of a rank, in which the launcher may run."""
        left_out = {name for name in self._environ if name.startswith("TORCHELASTIC_")} | RANK_VARIABLES
        return {name: value for name, value in self._environ.items() if name not in left_out}

    def complete_rank_job(self, job: RankJob) -> None:
        """Replace the placeholders in the words of a rank, and add the variables with the addresses."""
        if self._programs and self.addresses:
            fill = self.addresses.fill
            job["args"] = [fill(word, None) for word in job["args"]]
            own = {name: fill(value, None) for name, value in self._programs.target.env.items()}
            job["env"] |= {**self.addresses.variables(), **own}

    def fill_path(self, number: int, path: str) -> str:
        """Return the path of a program's file: placeholders are replaced, and its folder is the program's."""
        assert self.addresses
        filled = self.addresses.fill(path, self._instances[number])
        return os.path.join(os.path.expanduser(self.specs[number].cwd), filled)

    def _own_run_words(self, own: Instance) -> list[str]:
        """Return the first words of a program that has ranks of its own: those of a further ``ddplaunch run``."""
        # ``--cluster none``: it inherits the batch job's variables, but is not one of its tasks.
        words = [sys.executable, "-m", "ddplaunch", "run", "--cluster", "none"]
        words += ["--run-id", f"{self.run_id}.{own.program}"[-MAX_NAME:]]
        parts = self._placement.of(own.program) if self._placement else []
        if len(parts) > 1 and self.addresses:
            first = parts[0].spec.name
            host, port = self.addresses.of(first, WORLD_PORT)
            _, control = self.addresses.of(first, WORLD_CONTROL_PORT)
            words += ["--nnodes", str(len(parts)), "--node-rank", str(own.position), "--master-addr", host]
            words += ["--master-port", str(port), "--control-port", str(control)]
        return words

    def build(self, number: int, more: Mapping[str, str]) -> ProgramJob:
        """Return what a guard needs to start a program; ``more``: further variables."""
        spec = self.specs[number]
        variables = {"PYTHONUNBUFFERED": "1", **more}  # its output goes to a pipe, and is shown at once
        words, own_variables = spec.command, dict(spec.env)
        if spec.is_world:
            words = (*self._own_run_words(self._instances[number]), *words)
        if self.addresses:
            fill, instance = self.addresses.fill, next((each for each in self._instances if each.spec is spec), None)
            words = tuple(fill(word, instance) for word in words)
            own_variables = {name: fill(value, instance) for name, value in own_variables.items()}
            variables |= {**self.addresses.variables(), PROGRAM_VARIABLE: spec.name}
            variables |= self._gpu_variables.get(spec.name, {})
            if not spec.hold:
                self.addresses.release_ports(spec.name)
        command, *args = words
        job: ProgramJob = {
            "rank": number,
            "kind": "program",
            "target_text": command,
            "path": shutil.which(command, path=own_variables.get("PATH")) or command,
            "args": args,
            "env": {**variables, **own_variables},
            "cpus": None,
        }
        if spec.nice:
            job["nice"] = spec.nice
        if spec.cwd:
            job["cwd"] = os.path.expanduser(spec.cwd)
        return job
