"""The phases of an attempt: which may follow which."""

from __future__ import annotations

from ddplaunch.agent.ranks import NEXT, Phase


def test_every_phase_leads_to_the_end_and_the_end_nowhere():
    assert set(NEXT) == set(Phase)
    assert NEXT[Phase.ENDED] == set()
    for phase in Phase:
        reached, todo = set(), {phase}
        while todo:
            reached |= todo
            todo = set().union(*(NEXT[each] for each in todo)) - reached
        assert Phase.ENDED in reached
