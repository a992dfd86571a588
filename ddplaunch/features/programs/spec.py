"""What is known of a program before it starts: its command, its kind, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

Kind = Literal["main", "service", "sidecar"]
"""The job is done when all mains have returned 0; a service must live until then; a sidecar's end does not matter."""

DEFAULT_READY_TIMEOUT_S = 1800.0
DEFAULT_GRACE_S = 30.0


class ProgramSpec(Struct, frozen=True):
    """One program beside the ranks."""

    name: str  # unique in the job; the prefix of its lines
    command: tuple[str, ...]
    kind: Kind = "service"
    ready: str = ""  # "tcp", "http:/PATH", "line:TEXT", "file:PATH"; "": it is ready once it has started
    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    after: tuple[str, ...] = ()  # the programs that must be ready before it starts
    env: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = DEFAULT_GRACE_S  # between SIGTERM and SIGKILL

    @property
    def outlives_attempts(self) -> bool:
        """Whether it goes on when the ranks start again."""
        return self.kind == "sidecar"
