"""The options for hangs: ``--stall-timeout`` and others."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options
from ddplaunch.core.option_values import time_limit
from ddplaunch.core.options import Connections, Inspecting, Nodes, Stopping, TargetOptions

DEFAULT_STALL_TIMEOUT_S = 300.0
EARLY_STALL_CHECK_S = 20.0  # without output, until waiting ranks are inspected
LONG_WAIT = 600.0  # a wait this long (seconds) is reported although ranks print


# With two or three lines for an option, a group can be seen at once.
# fmt: off


class Hangs(OptionGroup, frozen=True):
    """Options for ranks that make no progress."""

    heading = "Time limits"
    after = "timeout"

    stall_timeout: Annotated[float | None, Option("--stall-timeout TIME",
        "Stop the job after this long without progress.  [default: only report it, after 24 s at the earliest]",
        time_limit, in_project=True)] = None
    on_stall: Annotated[str | None, Option("--on-stall stop|restart|report",
        "Action after --stall-timeout: stop the job, restart all ranks, or only report.  [default: stop]",
        in_project=True)] = None
    straggler_timeout: Annotated[float | None, Option("--straggler-timeout TIME",
        "Stop ranks that still run this long after the last other rank has ended.", time_limit, in_project=True)] = None

    @property
    def is_strict(self) -> bool:
        """Whether idle ranks that wait for no other rank also count as stalled."""
        return self.stall_timeout is not None

    @property
    def stall_timeout_s(self) -> float:
        """How long there may be no progress until ``stall_action`` applies."""
        return self.stall_timeout or DEFAULT_STALL_TIMEOUT_S

    @property
    def stall_action(self) -> str:
        return self.on_stall or ("stop" if self.is_strict else "report")

    @property
    def stall_check_interval_s(self) -> float:
        """Seconds between two inspections of ranks that may have stalled."""
        return max(self.stall_timeout_s / 5, min(1.0, self.stall_timeout_s / 2))

    def check_contradictions(self, options: Options) -> None:
        if self.on_stall and self.stall_timeout is None:
            raise UsageError(f"--on-stall {self.on_stall} works only with --stall-timeout", "add --stall-timeout 10m")
        if self.on_stall == "restart" and not options[Stopping].max_restarts:
            raise UsageError("--on-stall restart works only with --max-restarts", "add --max-restarts 3")
        if self.stall_timeout is None:
            return
        no_control = options[Connections].control == "none" and options[Nodes].nnodes[1] > 1
        for given, name, why in (
            (options[Inspecting].no_inspect, "--no-inspect", "it inspects the progress of the ranks"),
            (options[TargetOptions].no_python, "--no-python", "only Python programs can be inspected"),
            (no_control, "--control none", "each node sees only its own ranks"),
        ):
            if given:
                raise UsageError(f"--stall-timeout does not work with {name}: {why}", "leave one of them out")
