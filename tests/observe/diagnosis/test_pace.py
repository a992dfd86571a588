"""Tests of slow ranks: found where there are some, none in a balanced job, within the error of the clocks."""

import json
import math
import random
from itertools import pairwise

import msgspec
import pytest

from ddplaunch.observe.diagnosis.flight_recorder_arrivals import operations_per_rank, parse_arrivals
from ddplaunch.observe.diagnosis.inspection import CollectiveArrivals
from ddplaunch.observe.diagnosis.slow_ranks import (
    RankClock,
    describe_slow_ranks,
    mean_lateness,
    measure_lateness,
    typical_collective_gap_s,
)
from tests.observe.diagnosis.recorded_hangs import EMPTY_RECORDER

UNDECIDED = "cannot determine which node is slow: their clocks"

EPOCH = 1.79e9


def arrivals(rank, times, group="0", description="default_pg", number=1):
    gaps = tuple(round((b - a) * 1e6) for a, b in pairwise(times))
    return CollectiveArrivals(rank, group, description, number, times[0], gaps)


def steps(ranks, count=2000, slow=None, step=0.3, jitter=0.002, seed=0, ahead=None):
    """A job in which all wait for all at each step; ``slow`` has seconds that a rank takes longer, most of the time."""
    chance = random.Random(seed)
    now = EPOCH
    times = {rank: [] for rank in range(ranks)}
    for _ in range(count):
        arrived = {
            rank: now + step + chance.expovariate(1 / jitter) + (slow or {}).get(rank, 0) * (chance.random() < 0.92)
            for rank in times
        }
        for rank, seconds in arrived.items():
            times[rank].append(seconds + (ahead or {}).get(rank, 0.0))
        now = max(arrived.values())
    return [arrivals(rank, found) for rank, found in times.items()]


def describe(found, clocks=None):
    return describe_slow_ranks(measure_lateness(found, clocks))


def test_one_slow_rank():
    assert describe(steps(8, slow={5: 0.038})) == (
        "rank 5 was last in 93 % of the last 2,000 collectives (median delay 38 ms); "
        "the others spent 10 % of the time waiting for it",
    )
    assert [bool(measure_lateness(steps(8, count, {5: 0.038}))) for count in (9, 10)] == [False, True]


def test_mean_lateness_of_each_rank():
    late = mean_lateness(measure_lateness(steps(8, slow={5: 0.038})))
    assert late.pop(5) == pytest.approx(0.038 * 0.93, abs=0.004)
    assert max(late.values()) < 0.002
    assert mean_lateness(()) == {}


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
@pytest.mark.parametrize("jitter", [0.0, 0.002, 0.1])
def test_a_balanced_job_has_no_slow_rank(ranks, jitter):
    for seed in range(3):
        assert describe(steps(ranks, count=200, jitter=max(jitter, 1e-9), seed=seed)) == ()


def test_the_slow_ranks_of_one_host_are_one_sentence():
    (sentence,) = describe(steps(8, slow=dict.fromkeys((4, 5, 6, 7), 0.04)))
    assert sentence.startswith("ranks 4 to 7 were last in 100 % of the last 2,000 collectives (median delay 4")
    assert sentence.endswith("of the time waiting for them")


def test_two_slow_ranks_are_two_sentences():
    found = steps(8, slow={2: 0.040})
    more = list(found[6].gaps)
    for at in range(0, 1990, 10):
        more[at] += 80_000
        more[at + 1] -= 80_000
    found[6] = CollectiveArrivals(6, "0", "default_pg", 1, found[6].began, tuple(more))
    first, second = describe(found)
    assert first.startswith("rank 2 was last in 8")
    assert second.startswith("rank 6 was last in 11 % of the last 2,000 collectives (median delay 80 ms)")


def test_a_single_pause_makes_no_slow_rank():
    """One checkpoint and one short pause do not make a rank slow."""
    found = steps(4)
    gaps = list(found[1].gaps)
    for at in (500, 900):
        gaps[at] += 60_000_000
        gaps[at + 1] -= 60_000_000
    found[1] = CollectiveArrivals(1, "0", "default_pg", 1, found[1].began, tuple(gaps))
    assert describe(found) == ()


def test_rare_long_delays_are_counted():
    times = [[EPOCH + step for step in range(1000)] for _ in range(3)]
    for at in range(100, 900, 100):
        times[0][at] += 0.9
        for at_rank in times:
            at_rank[at + 1 :] = [each + 5 for each in at_rank[at + 1 :]]
        times[0][at] += 5
    (sentence,) = describe([arrivals(rank, found) for rank, found in enumerate(times)])
    assert sentence == (
        "rank 0 was last in 8 of the last 1,000 collectives (median delay 5.9 s); "
        "the others spent 5 % of the time waiting for it"
    )


def test_a_few_collectives_are_not_measured():
    assert measure_lateness(steps(4, count=9, slow={1: 1.0})) == ()
    assert measure_lateness([]) == ()
    assert measure_lateness(steps(1)) == ()


def test_collectives_that_most_ranks_entered():
    """Collectives that few ranks entered are not compared."""
    whole = steps(4, count=500, slow={2: 0.05})
    cut = CollectiveArrivals(3, "0", "default_pg", 1, whole[3].began, whole[3].gaps[:99])
    began = whole[0].began + sum(whole[0].gaps[:100]) / 1e6
    early = CollectiveArrivals(0, "0", "default_pg", 101, began, whole[0].gaps[100:])
    (group,) = measure_lateness([early, *whole[1:3], cut])
    assert group.collectives == 500
    assert [each.rank for each in group.slow_ranks] == [2]
    assert measure_lateness([whole[0], CollectiveArrivals(1, "0", "default_pg", 9000, EPOCH, whole[1].gaps)]) == ()


def test_clock_offsets_of_hosts():
    """Offsets are subtracted between hosts, and not needed within one."""
    exact = {rank: RankClock(rank // 2, 7.5 * (rank // 2), 0.0005) for rank in range(4)}
    (sentence,) = describe(steps(4, slow={1: 0.03}, ahead={2: 7.5, 3: 7.5}), exact)
    assert sentence.startswith("rank 1 was last in 93 %")
    same = {rank: RankClock(1, 3600.0, math.inf) for rank in range(4)}
    (sentence,) = describe(steps(4, slow={1: 0.03}), same)
    assert sentence.startswith("rank 1 was last in 94 %")


def test_inexact_clock_offsets():
    found = steps(4, slow={2: 0.03, 3: 0.03})
    vague = {rank: RankClock(rank // 2, 0.0, 0.04 * (rank // 2)) for rank in range(4)}
    assert describe(found, vague) == (f"{UNDECIDED} are known to 40 ms only",)
    unknown = {rank: RankClock(rank // 2, 0.0, math.inf if rank > 1 else 0.0) for rank in range(4)}
    assert describe(found, unknown) == (f"{UNDECIDED} have not been compared yet",)
    assert describe(steps(4), vague) == (), "no rank waits, so no report is needed"


@pytest.mark.parametrize(
    ("inner_late", "outer_late", "expected"),
    [
        ((2,), (2, 3), (
            "rank 2 was last in 100 % of the last 500 collectives of mesh_tp (median delay 20 ms); "
            "the others spent 25 % of the time waiting for it",
            "rank 3 arrived late at the collectives of default_pg because it waited in another group",
        )),
        ((), (3,), (
            "rank 3 was last in 100 % of the last 500 collectives (median delay 20 ms); "
            "the others spent 25 % of the time waiting for it",
        )),
    ],
)  # fmt: skip
def test_a_rank_that_waited_in_another_group_is_not_slow(inner_late, outer_late, expected):
    """Rank 3 comes late to the group of all, where it waited for rank 2 in their own group, or by itself."""
    inner, outer = {rank: [] for rank in range(4)}, {rank: [] for rank in range(4)}
    now = EPOCH
    for _ in range(500):
        for rank in range(4):
            inner[rank].append(now + 0.05 + 0.02 * (rank in inner_late) + 1e-6 * rank)
            outer[rank].append(now + 0.05 + 0.02 * (rank in outer_late) + 1e-5 * rank)
        now += 0.08
    found = [arrivals(rank, times) for rank, times in outer.items()]
    found += [arrivals(rank, inner[rank], str(1 + rank // 2), "mesh_tp") for rank in range(4)]
    assert describe(found) == expected


def test_a_group_without_a_description():
    found = [
        arrivals(rank, [EPOCH + step + (rank == 7) / 10 for step in range(50)], "4", "undefined") for rank in (3, 7)
    ]
    (sentence,) = describe(found)
    assert sentence.startswith("rank 7 was last in 100 % of the last 50 collectives of group 4 (median delay 100 ms)")


def entry(number, seconds, group=("0", "default_pg"), **changed):
    return {
        "collective_seq_id": number, "process_group": list(group), "is_p2p": False,
        "time_created_ns": int(seconds * 1e6) * 1000, "profiling_name": "gloo:all_reduce", **changed,
    }  # fmt: skip


def trace(*entries):
    return json.dumps({"version": "2.10", "pg_status": {}, "entries": entries}).encode()


def test_a_trace_is_read():
    tp = ("3", "mesh_tp")
    found = parse_arrivals(
        6,
        trace(
            entry(41, EPOCH),
            entry(7, EPOCH + 0.1, tp),
            entry(42, EPOCH + 0.2),
            entry(42, EPOCH + 0.3, is_p2p=True),
            entry(8, EPOCH + 0.4, tp),
            entry(8, EPOCH + 0.5, tp),
            entry(45, EPOCH + 1),
        ),
    )
    assert found == (
        CollectiveArrivals(6, "0", "default_pg", 41, EPOCH, (200_000,)),
        CollectiveArrivals(6, "0", "default_pg", 45, EPOCH + 1, ()),
        CollectiveArrivals(6, *tp, 7, EPOCH + 0.1, (300_000,)),
    )
    assert list(found[0]) == [(41, EPOCH), (42, EPOCH + 0.2)]


def test_collectives_of_a_recreated_group():
    entries = [entry(number, EPOCH + number) for number in range(1, 5)]
    again = [entry(number, EPOCH + 100 + number) for number in range(1, 3)]
    assert parse_arrivals(0, trace(*entries, *again)) == (
        CollectiveArrivals(0, "0", "default_pg", 1, EPOCH + 101, (1_000_000,)),
    )


@pytest.mark.parametrize(
    "hostile",
    [
        b"", b"\xff", b"[]", b"null", b'{"entries": 3}', b'{"entries": {}}', b'{"entries": [1]}',
        b'{"entries": "abc"}', b"[" * 100_000, b'{"entries": ' + b"[" * 100_000,
        b'{"entries": [{"is_p2p": false, "collective_seq_id": 1' + b"0" * 5000 + b"}]}",
        *(
            trace(entry(1, EPOCH, **{name: value}))
            for name, values in (
                ("collective_seq_id", (-1, "1", 1.5, True, None, 1 << 62, [1])),
                ("time_created_ns", (-1, "1", 1e18, False, None, 10**30)),
                ("process_group", (None, "0", [], ["0"], ["0", 1], [["0"], "x"], {"0": "x"}, ["0", "x", "y"])),
            )
            for value in values
        ),
    ],
    ids=lambda text: str(text[-60:]),
)  # fmt: skip
def test_malformed_traces_are_refused(hostile):
    with pytest.raises(ValueError, match=r"."):
        parse_arrivals(0, hostile)


def test_a_recorder_without_operations_has_no_arrivals():
    """torch for CUDA has two recorders, and one of them is empty in a job of one backend."""
    assert parse_arrivals(0, EMPTY_RECORDER.encode()) == ()


def test_names_of_groups_are_escaped_and_bounded():
    (found,) = parse_arrivals(0, trace(entry(1, EPOCH, ("\x1b]0;t\x07" + "x" * 9999, "\x1b[31mred\n\u202e"))))
    assert found.description == "\\x1b[31mred\\n\\u202e".replace("\\x1b[31m", "")
    assert found.group.startswith("\\x1b]0;t\\x07x")
    assert len(found.group) == 200


def test_arrivals_are_bounded():
    assert len(msgspec.json.encode(steps(64))) < 3 << 20
    assert [operations_per_rank(ranks) for ranks in (1, 64, 1000, 1_000_000)] == [2000, 2000, 200, 50]
    found = parse_arrivals(0, trace(*(entry(3 * number, EPOCH) for number in range(2000))))
    assert len(found) == 64
    assert (found[0].number, found[-1].number) == (3 * 1936, 3 * 1999)
    (last,) = parse_arrivals(0, trace(*(entry(number, EPOCH) for number in range(100))), 10)
    assert (last.number, len(last.gaps)) == (90, 9)


@pytest.mark.parametrize(
    ("gaps", "usual"),
    [
        ([100, 200, 500_000] * 100, 0.5),  # microseconds: three collectives a step
        ([500_000] * 500 + [60_000_000], 0.5),  # and a checkpoint
        ([500_000] * 9, 0.0),
        ([], 0.0),
    ],
)
def test_the_typical_gap_is_that_of_a_step(gaps, usual):
    assert typical_collective_gap_s([CollectiveArrivals(0, "0", "default_pg", 1, 0.0, tuple(gaps))]) == usual
