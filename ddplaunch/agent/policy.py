"""What a supervisor is told beside the plan, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from ddplaunch.agent.failure import Verdict


@dataclass(frozen=True)
class Policy:
    """How to start, show and stop the ranks; times in seconds.

    Attributes:
        modules: what the zygote imports; empty, and every rank is a fresh interpreter. asked: those the user named.
        show: the ranks whose output is shown, None for all.
        stdin: the rank that reads our standard input, None for nobody (a single rank always does).
    """

    modules: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    grace: float = 30.0
    max_restarts: int = 0
    restart_backoff: float = 0.0
    min_uptime: float = 5.0
    show: frozenset[int] | None = None
    stdin: int | None = None
    log_dir: str | None = None
    colour: bool = False


@dataclass(frozen=True)
class Outcome:
    """How the job ended: the launcher's exit code, and why if it is not the user's own doing."""

    code: int
    verdict: Verdict | None = None
    refused: tuple[str, str | None] | None = None
    remark: str | None = None
    log_folder: str | None = None
