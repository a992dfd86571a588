"""Reserves GPUs, CPUs or places for runs on this machine, in order of arrival."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ddplaunch.base.errors import LaunchError
from ddplaunch.features.reservations.claims import Claim, ClaimFile, Claims, OwnClaim, units_taken

POLL_INTERVAL_S = 0.1
JOB_VARIABLE = "DDPLAUNCH_LOCAL_JOB"
"""Set in a job of ``submit --scheduler local``: its number."""


class Need(ABC):
    """What a launcher needs before it starts."""

    queue: str  # needs with the same queue are served in one order
    what: str  # in words, "2 free GPUs"
    units: tuple[str, ...]  # what it would take

    @abstractmethod
    def choose(self, taken: Mapping[str, ClaimFile]) -> tuple[str, ...] | None:
        """Return the units to take, None if there are too few; ``taken``: what other launchers have."""


class NotFree(LaunchError):
    """Raised when too few units are free, and the time to wait is over."""

    def __init__(self, need: Need, files: Sequence[ClaimFile], before: int) -> None:
        super().__init__(f"{need.what}: not free")
        self.need, self.files = need, files
        self.before = before  # launchers that wait, and have arrived earlier


def reserve(
    claims: Claims, need: Need, wait_s: float | None, on_wait: Callable[[int, Sequence[ClaimFile]], None]
) -> tuple[OwnClaim, tuple[str, ...]]:
    """Reserve what ``need`` names; return the claim, which lasts as long as this process, and the reserved units.

    ``wait_s``: how long to wait; ``on_wait`` is called with the number of launchers that are served before, and all
    claims: at first, when the launcher directly before has stopped waiting, and, if next in line, at each poll.
    Raises NotFree.
    """
    deadline = time.monotonic() + (wait_s or 0)
    claim = Claim(need.queue, need.what, os.getpid(), os.environ.get(JOB_VARIABLE, ""), need.units)
    own: OwnClaim | None = None
    try:
        while True:
            with claims.lock():
                files = claims.list(need.queue)
                before = _earlier_claims(files, own, need)
                units = None if before else need.choose(units_taken(files))
                if units is not None:
                    granted = replace(claim, units=units)
                    if own is None:
                        return claims.add(granted, waits=False), units
                    own.record_units(granted)
                    return own, units
                if wait_s is None or time.monotonic() >= deadline:
                    raise NotFree(need, files, len(before))
                own = own or claims.add(claim, waits=True)
            on_wait(len(before), files)
            time.sleep(POLL_INTERVAL_S)
            while before and claims.is_waiting(before[-1].name) and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S)
    except BaseException:
        if own:
            own.release()
        raise


def _earlier_claims(files: Sequence[ClaimFile], own: OwnClaim | None, need: Need) -> list[ClaimFile]:
    """Return the claims of launchers that wait for some of the same units, and have arrived before this one."""
    return waiting_for([each for each in files if not (own and own.precedes(each))], need.units)


def waiting_for(files: Sequence[ClaimFile], units: Sequence[str]) -> list[ClaimFile]:
    """Return the claims of launchers that wait for some of these units."""
    return [each for each in files if not each.has_units and set(each.claim.units) & set(units)]


class CountedNeed(Need):
    """A number of units that are all the same, like CPUs."""

    def __init__(self, queue: str, what: str, count: int, total: int) -> None:
        self.queue, self.what, self._count = queue, what, count
        self.units = tuple(map(str, range(total)))

    def choose(self, taken: Mapping[str, ClaimFile]) -> tuple[str, ...] | None:
        """Return the first units that no other launcher has."""
        free = [unit for unit in self.units if unit not in taken]
        return tuple(free[: self._count]) if len(free) >= self._count else None


class PlaceNeed(CountedNeed):
    """One of N places for runs."""

    def choose(self, taken: Mapping[str, ClaimFile]) -> tuple[str, ...] | None:
        """Return the first free place; None while N runs have places, even places of runs with a greater N."""
        return super().choose(taken) if len(taken) < len(self.units) else None
