"""Search for the hosts on which a command fails, by running it on subsets. Pure: ``bisect`` runs the command.

A fault is one host, or several that fail together and pass without any one of them. It is found by delta debugging on
halves (Zeller 1999); if both halves pass, the hosts that fail together are searched across them (QuickXplain).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from enum import Enum
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

FAILURES_TO_BLAME = 3  # hosts that failed this often, and never passed, are bad
MAX_FAULTS = 3  # after this many faults a command that never passed is not tried further

T = TypeVar("T")
Hosts = tuple[str, ...]


class TrialResult(Enum):
    """Result of one run of the command."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


Trials = Generator[Hosts, TrialResult, T]
"""A generator that yields the hosts of the next run and is sent the result."""


class HostFault(Struct, frozen=True):
    """A minimal set of hosts that fail together."""

    hosts: Hosts
    left_out: Hosts = ()  # those to exclude so that the others pass
    with_others: bool = False  # they also fail with any other host, and pass alone


class FaultSearch:
    """State and result of a search for faulty hosts; ``run`` ends for any sequence of results."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self.faults: list[HostFault] = []
        self.flaky: list[Hosts] = []  # failed once, and passed or was skipped when run again
        self.good_hosts: Hosts | None = None  # the remaining hosts, once they have passed together
        self.fails_everywhere = False  # the search gave up: the command never passed
        self._index = {host: index for index, host in enumerate(self.hosts)}
        self._known: dict[frozenset[str], TrialResult] = {}
        self._failures = Counter[frozenset[str]]()

    @property
    def excluded_hosts(self) -> Hosts:
        """The hosts that a job should exclude."""
        found = () if self.fails_everywhere else self.faults
        return self._sort_hosts(host for fault in found for host in fault.left_out or fault.hosts)

    def run(self) -> Trials[None]:
        """Find one fault after the other, and leave its hosts out, until the remaining hosts pass."""
        rest = self.hosts
        while rest:
            outcome = yield from self._result_for(rest)
            if outcome is not TrialResult.FAILED:
                self.good_hosts = rest if outcome is TrialResult.PASSED else None
                break
            if self._never_passes():
                self.fails_everywhere = True
                return
            faulty = self._sort_hosts((yield from self._minimize_faulty_hosts(rest, ())))
            if (yield from self._fails_always(faulty)):
                self.faults.append(HostFault(faulty))
            else:
                self.flaky.append(faulty)
            rest = tuple(host for host in rest if host not in faulty)
        self.fails_everywhere = bool(self.faults) and TrialResult.PASSED not in self._known.values()
        yield from self._readmit_hosts()

    def _minimize_faulty_hosts(self, hosts: Hosts, others: Hosts) -> Trials[Hosts]:
        """Find a minimal subset of ``hosts`` that fails together with ``others``; all ``hosts`` together do fail."""
        if len(hosts) == 1:
            return hosts
        halves = hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]
        for half in halves:
            if (yield from self._result_for(half + others)) is TrialResult.FAILED:
                return (yield from self._minimize_faulty_hosts(half, others))
        some = yield from self._minimize_faulty_hosts(halves[0], halves[1] + others)
        return some + (yield from self._minimize_faulty_hosts(halves[1], some + others))

    def _fails_always(self, hosts: Hosts) -> Trials[bool]:
        while self._failures[frozenset(hosts)] < FAILURES_TO_BLAME:
            if (yield from self._run_trial(hosts)) is not TrialResult.FAILED:
                return False
        return True

    def _never_passes(self) -> bool:
        """Whether no run with as many hosts as the smallest fault has passed."""
        passed = max((len(hosts) for hosts, trial in self._known.items() if trial is TrialResult.PASSED), default=0)
        found = [len(fault.hosts) for fault in self.faults]
        return len(found) >= MAX_FAULTS and passed < min(found)

    def _readmit_hosts(self) -> Trials[None]:
        """Of the hosts that fail together, add to the good hosts those that pass together with the good hosts."""
        for index, fault in enumerate(self.faults):
            good, out = self.good_hosts or (), fault.hosts
            if len(fault.hosts) > 1:
                tried = []
                for host in fault.hosts:
                    tried.append((yield from self._result_for((*good, host))))
                failed = tuple(
                    host for host, trial in zip(fault.hosts, tried, strict=True) if trial is TrialResult.FAILED
                )
                out = failed or fault.hosts[-1:]  # without any one of them they pass
                readmitted = tuple(host for host in fault.hosts if host not in out)
                if len(readmitted) > 1 and (yield from self._result_for(good + readmitted)) is not TrialResult.PASSED:
                    readmitted, out = readmitted[:1], self._sort_hosts({*out, *readmitted[1:]})
                self.good_hosts = self._sort_hosts(good + readmitted)
                fault = replace(fault, with_others=bool(failed))
            self.faults[index] = replace(fault, left_out=out)

    def _result_for(self, hosts: Hosts) -> Trials[TrialResult]:
        """Return the result for these hosts, without a run if it is known: subsets of passing sets pass."""
        key = frozenset(hosts)
        if key in self._known:
            return self._known[key]
        if any(trial is TrialResult.PASSED and key <= known for known, trial in self._known.items()):
            return TrialResult.PASSED
        return (yield from self._run_trial(hosts))

    def _run_trial(self, hosts: Hosts) -> Trials[TrialResult]:
        trial = yield self._sort_hosts(hosts)
        self._known[frozenset(hosts)] = trial
        self._failures[frozenset(hosts)] += trial is TrialResult.FAILED
        return trial

    def _sort_hosts(self, hosts: Iterable[str]) -> Hosts:
        return tuple(sorted(hosts, key=self._index.__getitem__))
