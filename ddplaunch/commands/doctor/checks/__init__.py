"""The checks of one machine, a subject a file: what is read there, what that means for a job, and the rows of the page.

A new one is a file here, and a line and its fields in ``facts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Annotated

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass, field

if TYPE_CHECKING:
    from ddplaunch.commands.doctor.facts import NodeFacts
    from ddplaunch.commands.doctor.probe import HelperProbe


class Severity(Enum):
    """How much it matters: an error breaks a job, a warning slows it or may break it, a note is good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    severity: Severity
    subject: str  # "n1", "n1 GPU 3", "n0 to n2"
    text: str
    hint: str  # what to do


Findings = Iterator[Finding]
FactReader = Callable[[], dict[str, object]]
"""Something that was begun: call it to wait for its end, and get fields of NodeFacts."""


def _possible(value: int) -> int:
    if not -1 << 70 <= value <= 1 << 70:
        raise ValueError("a number out of range")
    return value


KernelNumber = Annotated[int, _possible]
"""What a kernel or a file system may say: some have limits and sizes of 2**63 and more."""


@dataclass(frozen=True)
class CheckContext:
    """What a reading may depend on."""

    cwd: str
    node_zero_address: str  # node 0's address; "" where there is one node
    environ: Mapping[str, str]
    benchmark_process: (
        HelperProbe  # a process of ``benchmark``, whose first line is a TorchFound: torch is imported once
    )
    thorough: bool = False


@dataclass(frozen=True)
class HealthCheck:
    """One subject."""

    read: Callable[[CheckContext], FactReader]
    """Begins to look at this machine; what may take its time, or never answer, is left to a Probe."""
    findings: Callable[[str, NodeFacts], Findings]
    """What is wrong with the machine of this name, whatever the others are."""
    text_rows: Mapping[str, Callable[[NodeFacts], str | None]] = field(default_factory=dict)
    """Rows of the page, by their labels."""
    size_rows: Mapping[str, Callable[[NodeFacts], int | None]] = field(default_factory=dict)
    """Rows in bytes, which show the smallest and the largest value."""
