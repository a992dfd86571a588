"""How one node starts its ranks and shows what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch.output.show import Shown

if TYPE_CHECKING:
    from ddplaunch.agent.sidecar import Sidecar


@dataclass(frozen=True)
class Policy:
    """What was typed about this node alone."""

    modules: tuple[str, ...]  # what the zygote imports; empty, and every rank is a fresh interpreter
    asked: tuple[str, ...]  # those that the user named
    show: Shown
    stdin: int | None  # the rank that reads our standard input, None for nobody (a single rank always does)
    log_dir: str | None
    colour: bool
    patience: float  # seconds after which a reader of our output that takes nothing is stuck
    quiet: float  # seconds of a wait for the other nodes without a line about it
    preempt_signal: int | None  # the scheduler's warning, None where none is listened for
    preempt_forward: int | None  # what the ranks get when it comes, None for no signal
    sidecars: tuple[Sidecar, ...]  # none on other nodes than node 0
