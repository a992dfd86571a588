"""How a job ended, alike on every node."""

from __future__ import annotations

from dataclasses import dataclass

from ddplaunch.control.failure import Verdict


@dataclass(frozen=True)
class Outcome:
    """The launcher's exit code, and why if it is not the user's own doing.

    Attributes:
        refused: the launcher's own complaint about what was typed: (message, hint).
        remark: one line more.
        told: whether node 0 tells people of it, in the log that this node prints to as well.
    """

    code: int
    verdict: Verdict | None = None
    refused: tuple[str, str | None] | None = None
    remark: str | None = None
    told: bool = False
