"""Whose turn it is to be connected to."""

from ddplaunch.ssh.turns import ALL, ONE_WAY, TRIES, Turns


def test_so_many_at_once_and_fewer_behind_one_machine():
    turns = Turns(["jump"] * 10 + [f"n{number}" for number in range(40)])
    begun = list(turns.take())
    assert len(begun) == ALL
    assert [node for node in begun if node < 10] == list(range(ONE_WAY))
    assert list(turns.take()) == []
    turns.done(20)
    assert list(turns.take()) == [34]
    turns.done(3)
    assert list(turns.take()) == [8]
    turns.clear()
    turns.done(4)
    assert list(turns.take()) == []


def test_a_machine_that_refuses_several_gets_half_as_many():
    turns = Turns(["jump"] * 20)
    assert list(turns.take()) == list(range(8))
    assert turns.refused(1)
    assert turns.refused(2)  # of the same eight
    for node in (0, 3, 4, 5):
        turns.done(node)
    turns.back(1)
    assert list(turns.take()) == [8, 9]
    assert turns.refused(8)
    assert list(turns.take()) == []
    turns.done(9)
    turns.done(6)
    assert list(turns.take()) == [10]


def test_a_host_is_given_up_in_the_end():
    turns = Turns(["a"])
    for number in range(TRIES):
        assert list(turns.take()) == [0]
        assert turns.refused(0) == (number < TRIES - 1)
        turns.back(0)
