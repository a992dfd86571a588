"""How one node starts its ranks and shows what they say."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field
from ddplaunch.plan.layout import Rank
from ddplaunch.words import shell_quote

if TYPE_CHECKING:
    import re

    from ddplaunch.preload.choice import PreloadPlan


@dataclass(frozen=True)
class ShowRule:
    """Some ranks, and which of their descriptors 1 and 2 are shown."""

    rank: int | None  # None is all ranks
    is_local_rank: bool = False  # whether it is a local rank, on every node
    streams: frozenset[int] = frozenset({1, 2})

    def matches(self, rank: Rank) -> bool:
        return self.rank is None or self.rank == (rank.local_rank if self.is_local_rank else rank.rank)


@dataclass(frozen=True)
class ShowRules:
    """What ``--show`` says; of several rules that name a rank the last counts, and without one it is not shown."""

    rules: tuple[ShowRule, ...]
    full_tracebacks: bool = True  # with the tracebacks of ranks that failed because of others, in a terminal too
    merge: bool | None = False  # whether equal lines of several ranks are shown once; None: where a person looks

    def streams_for(self, rank: Rank) -> frozenset[int]:
        return next((rule.streams for rule in reversed(self.rules) if rule.matches(rank)), frozenset())


@dataclass(frozen=True)
class Sidecar:
    """A program that begins and ends with the job.

    ``url_pattern`` is the title and the pattern of the line in which it says where it answers. What it prints before
    that is of interest only if it fails.
    """

    name: str  # what its lines and its log are marked by; no two of a job have the same
    argv: tuple[str, ...]
    path: str
    variables: Mapping[str, str] = field(default_factory=dict)  # beside our own environment
    url_pattern: tuple[str, re.Pattern[bytes]] | None = None

    @property
    def command_text(self) -> str:
        return shell_quote(self.argv)


@dataclass(frozen=True)
class NotifyCommand:
    """A command of the user's that is told what happens."""

    argv: tuple[str, ...]
    path: str

    @property
    def command_text(self) -> str:
        return shell_quote(self.argv)


@dataclass(frozen=True)
class NodeConfig:
    """What was typed about this node alone."""

    preload: PreloadPlan  # what the zygote imports, if it forks
    show: ShowRules
    stdin: int | None  # the rank that reads our standard input, None for nobody (a single rank always does)
    log_dir: str | None
    inspect: bool  # whether ranks can be asked what they are doing
    history: bool  # whether the run is kept for ``ddplaunch report`` and the like
    colour: bool
    debug: bool  # whether ranks wait for a person at breakpoints though none is here, and groups get a day
    debug_timeout: float  # seconds for which a rank waits while nobody types
    post_mortem: bool  # whether a rank stays at the exception that ends it
    debugpy: frozenset[int]  # the ranks to which an editor may attach
    oom_report: bool  # whether each rank tells what it had on its GPU when CUDA ran out of memory
    waits_for_debugger: bool  # whether ranks wait for a person at all
    has_debug_prompt: bool  # whether that person is at our terminal
    prefix: str  # before each line of a rank: output/prefix.py
    output_timeout_s: float  # seconds after which a reader of our output that takes nothing is stuck
    quiet_s: float  # seconds of a wait for the other nodes without a line about it
    preempt_signal: int | None  # the scheduler's warning, None where none is listened for
    preempt_forward: int | None  # what the ranks get when it comes, None for no signal
    sidecars: tuple[Sidecar, ...]  # none on other nodes than node 0
    metrics: str | None  # the file for Prometheus
    checkpoint: str | None = None  # the pattern of what the program saves
    notify: tuple[NotifyCommand, ...] = ()  # which are told what happens; likewise
    warm_idle_timeout_s: float | None = (
        None  # seconds for which a zygote is kept for other runs; None where this run has its own
    )
    warm_unavailable_reason: str | None = None  # why that is None, where one was asked for
    in_slurm_step: bool = False  # whether the tasks of a Slurm step are the job's nodes
    has_live_view: bool = False  # whether a live view is shown below the output, and has the terminal's keys
