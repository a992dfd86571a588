"""How often a job went on with nodes lost or added, and whether it may once more."""

from __future__ import annotations

from ddplaunch.control.rules import Rules
from ddplaunch.control.seat import Seats


class Membership:
    """Counts what ``--max-membership-changes`` allows."""

    def __init__(self, rules: Rules, seats: Seats) -> None:
        self._rules, self._seats = rules, seats
        self.changes = 0

    def change(self, why: str) -> str | None:
        """Count one more; return None, or why the job cannot go on where it cannot: ``why``, and what is used up."""
        rules, few = self._rules, len(self._seats) < self._rules.min_nodes
        if few and rules.elastic:
            return f"{why}; {len(self._seats)} of at least {rules.min_nodes} nodes are left"
        if few:
            return why
        if self.changes >= rules.max_membership_changes:
            return f"{why}; all {rules.max_membership_changes} --max-membership-changes were used"
        self.changes += 1
        return None
