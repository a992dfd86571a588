"""Tests of thinning samples, and of finding the rank that is behind."""

import os
import random
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.core.events import AttemptPlanned, JobEnded, RankStarted
from ddplaunch.observe.diagnosis.inspection import GroupState, Inspection, ProcessCondition, RankInspection
from ddplaunch.observe.samples import node
from ddplaunch.observe.samples.node import MAX_COMPARABLE_RATE, CounterSnapshot, SampleCollector, compute_sample
from ddplaunch.observe.samples.sample import GpuSample, NodeSample, RankSample, downsample, ranks_behind
from ddplaunch.system.devices.gpu_usage import GpuUsage
from ddplaunch.system.devices.process_usage import ProcessUsage
from tests.features.runs.recorded_events import plan


def some(seed: int) -> list[NodeSample]:
    """Random samples of a few attempts."""
    chance = random.Random(seed)
    time, found = 1e9, []
    for attempt in range(chance.randint(1, 4)):
        for _ in range(chance.randint(0, 60)):
            seconds = chance.choice([1.0, 1.0, 2.0, 15.0, 15.0, 60.0])
            time += seconds
            ranks = tuple(
                RankSample(rank, *(chance.choice([None, chance.uniform(0, 9)]) for _ in range(6)))
                for rank in range(chance.randint(1, 3))
            )
            gpus = (GpuSample(0, 1, 50.0, chance.uniform(0, 9), 300.0, 0.0),)
            found.append(NodeSample(time, seconds, attempt, ranks, gpus))
        time += 5
    return found


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_downsampling_keeps_totals_and_maxima(seed):
    whole = some(seed)
    most = 4 + seed
    found = downsample(whole, most)
    assert len(found) <= most
    assert [each.time for each in found] == sorted({each.time for each in found})
    assert sum(each.seconds for each in found) == pytest.approx(sum(each.seconds for each in whole))
    assert downsample(found, most) == found, "once is enough"
    for number in {each.attempt for each in whole}:
        before, after = ([each for each in all_ if each.attempt == number] for all_ in (whole, found))
        assert sum(each.seconds for each in before) == pytest.approx(sum(each.seconds for each in after))
        highest = [
            max((rank.memory or 0.0 for each in all_ for rank in each.ranks), default=0) for all_ in (before, after)
        ]
        assert highest[0] == highest[1]
        busy = [sum(each.seconds * each.gpus[0].busy for each in all_) for all_ in (before, after)]
        assert busy[0] == pytest.approx(busy[1])


def test_two_samples_become_one_with_means_and_the_most_memory():
    gpus = GpuSample(0, 1, 40.0, 9.0, 100.0, 0.0), GpuSample(0, 1, 80.0, 5.0, 300.0, 1.0)
    first = NodeSample(10.0, 1.0, 2, (RankSample(0, 1.0, 5.0, 8.0, None, 4.0, 0.0),), gpus[:1])
    new = RankSample(1, 9.0, 9.0, 9.0, 9.0, 9.0, 0.0)
    last = NodeSample(13.0, 3.0, 2, (RankSample(0, 3.0, 2.0, 0.0, 2.0, 8.0, 1.0), new), gpus[1:])
    ranks = (RankSample(0, 2.5, 5.0, 2.0, 2.0, 7.0, 0.75), new)
    merged = NodeSample(13.0, 4.0, 2, ranks, (GpuSample(0, 1, 70.0, 9.0, 250.0, 0.75),))
    assert downsample([first, last], 1) == [merged]


def test_downsampling_keeps_the_last_of_many_attempts():
    whole = [NodeSample(float(n), 1.0, n, (RankSample(0, 1.0, 1.0, 1.0, 1.0, None, None),)) for n in range(100)]
    assert [each.attempt for each in downsample(whole, 10)] == [*range(90, 100)]


def test_samples_cover_about_the_same_time():
    """After a week of repeated downsampling, the first samples are as dense as the last."""
    found: list[NodeSample] = []
    for number in range(4 * 60 + 23 * 60 + 6 * 1440):
        seconds = 15.0 if number < 240 else 60.0
        found.append(NodeSample(1e9 + number, seconds, 0, (RankSample(0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0),)))
        if len(found) > 200:
            found = downsample(found, 100)
    lengths = [each.seconds for each in found]
    assert max(lengths[:50]) <= 2 * min(lengths[:50])
    assert sum(lengths) == 3600 + 60 * (len(range(4 * 60 + 23 * 60 + 6 * 1440)) - 240)


def inspected(*entered: dict[str, int]) -> Inspection:
    ranks = (
        RankInspection(
            n, "", n + 1, ProcessCondition.ALIVE, groups=tuple(GroupState(g, k, k - 1) for g, k in each.items())
        )
        for n, each in enumerate(entered)
    )
    return Inspection(0.0, tuple(ranks), len(entered))


@pytest.mark.parametrize(
    ("entered", "late"),
    [
        (({"0": 7}, {"0": 7}), set()),
        (({"0": 7}, {"0": 6}, {"0": 7}), {1}),
        (({"0": 7, "mesh": 3}, {"0": 7, "mesh": 4}, {"0": 7, "other": 9}), {0}),
        (({}, {"0": 1}), set()),
    ],
)
def test_ranks_behind(entered, late):
    assert ranks_behind(inspected(*entered)) == late


@pytest.mark.parametrize(("most", "late"), [(4, 1.0), (4 * MAX_COMPARABLE_RATE, 1.0), (5 * MAX_COMPARABLE_RATE, None)])
def test_a_sample_has_the_rates_between_two_snapshots(most, late):
    """Rank 1 has been replaced, and no collective of rank 2 is known."""
    used = {0: ProcessUsage(6.0, 700, 1000, 40), 1: ProcessUsage(2.0, 300, 80, 20), 2: ProcessUsage(8.0, 100)}
    before = CounterSnapshot(plan(), 1e9, 50.0, usage={0: ProcessUsage(2.0, 1, 200, 0), 1: ProcessUsage(9.0)})
    groups = {0: {"0": most}, 1: {"0": 2, "new": 2}}
    gpus = GpuUsage(0, 50, 9, None, (7, 11), 310.5, True), GpuUsage(1, None, None, None)
    now = CounterSnapshot(plan(), 1e9 + 4, 54.0, {1: 11}, used, groups, frozenset({1}), gpus)
    sample = compute_sample(replace(before, groups={0: {"0": 0}, 1: {"0": 9}}), now, 3)
    assert (sample.time, sample.seconds, sample.attempt) == (1e9 + 4, 4.0, 3)
    assert sample.ranks == (
        RankSample(0, 1.0, 700.0, 200.0, 10.0, most / 4, None if late is None else 0.0),
        RankSample(1, 0.0, 300.0, 20.0, 5.0, 0.5, late),
        RankSample(2, 2.0, 100.0, 0.0, 0.0, None, None),
    )
    assert sample.gpus == (GpuSample(0, 1, 50.0, 9.0, 310.5, 1.0), GpuSample(1, -1, None, None, None, None))


def test_each_attempt_is_sampled_with_a_gpu_query_of_its_own(monkeypatch):
    """The query's process may have been killed with the ranks of the last attempt."""
    queries, samples, published = [], [], []

    def query(loop, on_usage):
        queries.append(SimpleNamespace(usage=(), closed=0, query=lambda: on_usage() or True))
        queries[-1].close = lambda made=queries[-1]: setattr(made, "closed", made.closed + 1)
        return queries[-1]

    monkeypatch.setattr(node, "GpuUsageQuery", query)
    monkeypatch.setattr(node, "EARLY_INTERVALS_S", (0.0, 60.0))
    loop = EventLoop()
    collector = SampleCollector(loop, None, lambda event: None)
    collector.add_listener(lambda: published.append(len(samples)))
    collector.subscribe(lambda snapshot, sample: sample and samples.append((sample.attempt, len(sample.ranks))))
    one = plan(ranks=1)
    one = replace(one, ranks=(replace(one.ranks[0], device="cuda:0"),))
    for attempt in range(2):
        collector.observe(AttemptPlanned(one, attempt))
        collector.observe(RankStarted(0, os.getpid(), attempt))
        loop.run_once()
    collector.observe(JobEnded(0, None))
    assert published == [0, 1, 2], "with the first plan, and after each sample"
    assert (samples, [each.closed for each in queries]) == ([(0, 1), (1, 1)], [1, 1])
