"""How one node starts its ranks and shows what they say."""

from __future__ import annotations

from collections.abc import Mapping

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field
from ddplaunch.plan.layout import Rank
from ddplaunch.words import quoted

if TYPE_CHECKING:
    import re

    from ddplaunch.preload.choice import Choice


@dataclass(frozen=True)
class Rule:
    """Some ranks, and which of their descriptors 1 and 2 are shown."""

    number: int | None  # None is all ranks
    local: bool = False  # whether it is a local rank, on every node
    streams: frozenset[int] = frozenset({1, 2})

    def names(self, rank: Rank) -> bool:
        return self.number is None or self.number == (rank.local_rank if self.local else rank.rank)


@dataclass(frozen=True)
class Shown:
    """What ``--show`` says; of several rules that name a rank the last counts, and without one it is not shown."""

    rules: tuple[Rule, ...]
    whole: bool = True  # with the tracebacks of ranks that failed because of others, in a terminal too
    merge: bool | None = False  # whether equal lines of several ranks are shown once; None: where a person looks

    def streams(self, rank: Rank) -> frozenset[int]:
        return next((rule.streams for rule in reversed(self.rules) if rule.names(rank)), frozenset())


@dataclass(frozen=True)
class Sidecar:
    """A program that begins and ends with the job.

    ``announces`` is the title and the pattern of the line in which it says where it answers. What it prints before
    that is of interest only if it fails.
    """

    name: str  # what its lines and its log are marked by; no two of a job have the same
    words: tuple[str, ...]
    path: str
    variables: Mapping[str, str] = field(default_factory=dict)  # beside our own environment
    announces: tuple[str, re.Pattern[bytes]] | None = None

    @property
    def command(self) -> str:
        return quoted(self.words)


@dataclass(frozen=True)
class Command:
    """A command of the user's that is told what happens."""

    words: tuple[str, ...]
    path: str

    @property
    def command(self) -> str:
        return quoted(self.words)


@dataclass(frozen=True)
class Policy:
    """What was typed about this node alone."""

    preload: Choice  # what the zygote imports, if it forks
    show: Shown
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
    parks: bool  # whether ranks wait for a person at all
    prompts: bool  # whether that person is at our terminal
    prefix: str  # before each line of a rank: output/prefix.py
    patience: float  # seconds after which a reader of our output that takes nothing is stuck
    quiet: float  # seconds of a wait for the other nodes without a line about it
    preempt_signal: int | None  # the scheduler's warning, None where none is listened for
    preempt_forward: int | None  # what the ranks get when it comes, None for no signal
    sidecars: tuple[Sidecar, ...]  # none on other nodes than node 0
    metrics: str | None  # the file for Prometheus
    checkpoint: str | None = None  # the pattern of what the program saves
    notify: tuple[Command, ...] = ()  # which are told what happens; likewise
    warm: float | None = None  # seconds for which a zygote is kept for other runs; None where this run has its own
    cold: str | None = None  # why that is None, where one was asked for
    in_step: bool = False  # whether the tasks of a Slurm step are the job's nodes
    live: bool = False  # whether a live view is shown below the output, and has the terminal's keys
