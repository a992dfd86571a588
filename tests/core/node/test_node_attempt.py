"""Tests of the phases of an attempt: which may follow which."""

from __future__ import annotations

from ddplaunch.core.node.node_attempt import ATTEMPT_PHASE_TRANSITIONS, AttemptPhase


def test_every_phase_leads_to_the_end_and_the_end_nowhere():
    assert set(ATTEMPT_PHASE_TRANSITIONS) == set(AttemptPhase)
    assert ATTEMPT_PHASE_TRANSITIONS[AttemptPhase.ENDED] == set()
    for phase in AttemptPhase:
        reached, todo = set(), {phase}
        while todo:
            reached |= todo
            todo = set().union(*(ATTEMPT_PHASE_TRANSITIONS[each] for each in todo)) - reached
        assert AttemptPhase.ENDED in reached
