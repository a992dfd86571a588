"""Which of many hosts a command fails on, found by trying it on some of them at a time. Pure: ``bisect`` runs it.

A fault is one host, or several that fail together and pass without any one of them. To find one, halves are tried as
delta debugging does (Zeller 1999); where both pass, what fails with a half is sought in the other (QuickXplain).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from enum import Enum
from typing import TypeVar

from ddplaunch.dataclass import dataclass, replace

FAILURES_TO_BLAME = 3  # what failed so often, and never passed, is bad
MAX_FAULTS = 3  # faults, after which a command that has never passed is not tried on more hosts

T = TypeVar("T")
Hosts = tuple[str, ...]


class TrialResult(Enum):
    """What a run of the command gave."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


Trials = Generator[Hosts, TrialResult, T]
"""Yields the hosts to run on next, and gets what that gave."""


@dataclass(frozen=True)
class HostFault:
    """Hosts that fail together, and none less."""

    hosts: Hosts
    left_out: Hosts = ()  # so that the others pass
    with_others: bool = False  # those fail with any other host, too, and pass alone


class FaultSearch:
    """What is known so far; ``run`` finds out more, and ends whatever it is told."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        self.faults: list[HostFault] = []
        self.flaky: list[Hosts] = []  # what failed, and passed or was skipped when it was tried again
        self.good_hosts: Hosts | None = None  # the others, once they have passed together
        self.fails_everywhere = False  # given up: it never passed
        self._place = {host: place for place, host in enumerate(self.hosts)}
        self._known: dict[frozenset[str], TrialResult] = {}
        self._failures = Counter[frozenset[str]]()

    @property
    def excluded_hosts(self) -> Hosts:
        """The hosts that a job should do without."""
        found = () if self.fails_everywhere else self.faults
        return self._sorted(host for fault in found for host in fault.left_out or fault.hosts)

    def run(self) -> Trials[None]:
        """Take out one fault after the other until the rest passes."""
        rest = self.hosts
        while rest:
            outcome = yield from self._result_for(rest)
            if outcome is not TrialResult.FAILED:
                self.good_hosts = rest if outcome is TrialResult.PASSED else None
                break
            if self._is_hopeless():
                self.fails_everywhere = True
                return
            found = self._sorted((yield from self._minimize(rest, ())))
            if (yield from self._fails_always(found)):
                self.faults.append(HostFault(found))
            else:
                self.flaky.append(found)
            rest = tuple(host for host in rest if host not in found)
        self.fails_everywhere = bool(self.faults) and TrialResult.PASSED not in self._known.values()
        yield from self._readmit()

    def _minimize(self, hosts: Hosts, beside: Hosts) -> Trials[Hosts]:
        """The fewest of these hosts that fail with those beside them, as all of them do."""
        if len(hosts) == 1:
            return hosts
        halves = hosts[: len(hosts) // 2], hosts[len(hosts) // 2 :]
        for half in halves:
            if (yield from self._result_for(half + beside)) is TrialResult.FAILED:
                return (yield from self._minimize(half, beside))
        some = yield from self._minimize(halves[0], halves[1] + beside)
        return some + (yield from self._minimize(halves[1], some + beside))

    def _fails_always(self, hosts: Hosts) -> Trials[bool]:
        while self._failures[frozenset(hosts)] < FAILURES_TO_BLAME:
            if (yield from self._run_trial(hosts)) is not TrialResult.FAILED:
                return False
        return True

    def _is_hopeless(self) -> bool:
        """Whether no run passed that had as many hosts as any fault."""
        passed = max((len(hosts) for hosts, trial in self._known.items() if trial is TrialResult.PASSED), default=0)
        found = [len(fault.hosts) for fault in self.faults]
        return len(found) >= MAX_FAULTS and passed < min(found)

    def _readmit(self) -> Trials[None]:
        """Of hosts that fail together, take back those that pass with the sound ones."""
        for place, fault in enumerate(self.faults):
            sound, out = self.good_hosts or (), fault.hosts
            if len(fault.hosts) > 1:
                tried = []
                for host in fault.hosts:
                    tried.append((yield from self._result_for((*sound, host))))
                failed = tuple(
                    host for host, trial in zip(fault.hosts, tried, strict=True) if trial is TrialResult.FAILED
                )
                out = failed or fault.hosts[-1:]  # without any one of them they pass
                kept = tuple(host for host in fault.hosts if host not in out)
                if len(kept) > 1 and (yield from self._result_for(sound + kept)) is not TrialResult.PASSED:
                    kept, out = kept[:1], self._sorted({*out, *kept[1:]})
                self.good_hosts = self._sorted(sound + kept)
                fault = replace(fault, with_others=bool(failed))
            self.faults[place] = replace(fault, left_out=out)

    def _result_for(self, hosts: Hosts) -> Trials[TrialResult]:
        """What these hosts give, from what is known where that tells: some of those that pass together pass."""
        asked = frozenset(hosts)
        if asked in self._known:
            return self._known[asked]
        if any(trial is TrialResult.PASSED and asked <= known for known, trial in self._known.items()):
            return TrialResult.PASSED
        return (yield from self._run_trial(hosts))

    def _run_trial(self, hosts: Hosts) -> Trials[TrialResult]:
        trial = yield self._sorted(hosts)
        self._known[frozenset(hosts)] = trial
        self._failures[frozenset(hosts)] += trial is TrialResult.FAILED
        return trial

    def _sorted(self, hosts: Iterable[str]) -> Hosts:
        return tuple(sorted(hosts, key=self._place.__getitem__))
