"""How one node starts its ranks and shows what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch.output.show import Shown

if TYPE_CHECKING:
    from ddplaunch.agent.sidecar import Sidecar


@dataclass(frozen=True)
class Policy:
    """What was typed about this node alone.

    Attributes:
        modules: what the zygote imports; empty, and every rank is a fresh interpreter. asked: those the user named.
        show: whose output is shown.
        stdin: the rank that reads our standard input, None for nobody (a single rank always does).
        patience: seconds after which a reader of our output that takes nothing is stuck.
        quiet: seconds for which the wait for the other nodes is nothing to tell of.
        preempt_signal: the scheduler's warning, None where none is listened for.
        preempt_forward: what the ranks get when it comes, None for no signal.
        sidecars: what runs beside the ranks; none on other nodes than node 0.
    """

    modules: tuple[str, ...]
    asked: tuple[str, ...]
    show: Shown
    stdin: int | None
    log_dir: str | None
    colour: bool
    patience: float
    quiet: float
    preempt_signal: int | None
    preempt_forward: int | None
    sidecars: tuple[Sidecar, ...]
