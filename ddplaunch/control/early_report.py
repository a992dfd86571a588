"""What people read of a failure while ranks take their time to stop."""

from __future__ import annotations

from collections.abc import Collection

from ddplaunch.control.failure import Verdict
from ddplaunch.control.seat import Part, Seat
from ddplaunch.words import named


def early_report(headline: str, verdict: Verdict, grace: float, seats: Collection[Seat]) -> str:
    """Say what failed, and which nodes have up to ``grace`` seconds to stop their ranks: none are named where
    ``seats`` is empty.
    """
    wait = f"waiting up to {grace:g} s (--grace) for the other ranks"
    if seats:
        wait += f" on {named(seat.name for seat in seats if seat.part is not Part.DRAINED)}"
    traceback = (f"  {line}" for line in (verdict.first.traceback or "").splitlines())
    return "\n".join([headline, *traceback, wait])
