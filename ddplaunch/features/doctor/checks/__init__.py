"""The checks of one machine, one file per subject: the facts to read, the findings on them, and rows of the report.

A new check is a file here, a line in ``node_checks``, and its fields in ``node_facts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum

from msgspec import Struct, field

from ddplaunch.features.doctor.node_facts import NodeFacts
from ddplaunch.features.doctor.probe import HelperProbe


class Severity(Enum):
    """Severity of a finding: an error breaks a job, a warning slows it or may break it, a note is information."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(Struct, frozen=True):
    """A problem that the doctor reports."""

    severity: Severity
    subject: str  # "n1", "n1 GPU 3", "n0 to n2"
    text: str
    hint: str  # what to do


Findings = Iterator[Finding]
FactReader = Callable[[], dict[str, object]]
"""Waits for a started check; returns fields of NodeFacts."""


class CheckContext(Struct, frozen=True):
    """The inputs of a check."""

    cwd: str
    node_zero_address: str  # "" with one node
    benchmark_process: HelperProbe  # runs ``benchmark``; its first line is a TorchFacts, so torch is imported once


class HealthCheck(Struct, frozen=True):
    """One check: reads facts of its subject, and turns them into findings and rows of the report."""

    read: Callable[[CheckContext], FactReader]
    """Starts to read the facts of this machine; calls that may be slow or hang run in a HelperProbe."""
    findings: Callable[[str, NodeFacts], Findings]
    """The findings on the machine of this name, independent of other machines."""
    text_rows: Mapping[str, Callable[[NodeFacts], str | None]] = field(default_factory=dict)
    """Rows of the report, by label."""
    size_rows: Mapping[str, Callable[[NodeFacts], int | None]] = field(default_factory=dict)
    """Rows in bytes, by label: the report shows the smallest and the largest value."""
