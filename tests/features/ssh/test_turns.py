"""Tests of the order in which hosts are connected to."""

from ddplaunch.features.ssh.connection_limiter import MAX_ATTEMPTS, MAX_CONCURRENT, MAX_PER_GATEWAY, ConnectionLimiter


def test_connections_are_limited_in_all_and_by_gateway():
    turns = ConnectionLimiter(["jump"] * 10 + [f"n{number}" for number in range(40)])
    begun = list(turns.next_hosts())
    assert len(begun) == MAX_CONCURRENT
    assert [node for node in begun if node < 10] == list(range(MAX_PER_GATEWAY))
    assert list(turns.next_hosts()) == []
    turns.release(20)
    assert list(turns.next_hosts()) == [34]
    turns.release(3)
    assert list(turns.next_hosts()) == [8]
    turns.clear()
    turns.release(4)
    assert list(turns.next_hosts()) == []


def test_a_machine_that_refuses_several_gets_half_as_many():
    turns = ConnectionLimiter(["jump"] * 20)
    assert list(turns.next_hosts()) == list(range(8))
    assert turns.on_refused(1)
    assert turns.on_refused(2)  # of the same eight
    for node in (0, 3, 4, 5):
        turns.release(node)
    turns.requeue(1)
    assert list(turns.next_hosts()) == [8, 9]
    assert turns.on_refused(8)
    assert list(turns.next_hosts()) == []
    turns.release(9)
    turns.release(6)
    assert list(turns.next_hosts()) == [10]


def test_a_host_is_given_up_in_the_end():
    turns = ConnectionLimiter(["a"])
    for number in range(MAX_ATTEMPTS):
        assert list(turns.next_hosts()) == [0]
        assert turns.on_refused(0) == (number < MAX_ATTEMPTS - 1)
        turns.requeue(0)
