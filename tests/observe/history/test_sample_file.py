"""Tests of samples in the history: those of a real run, of a month, and damaged ones."""

import os
import random
import threading
import time

import pytest

from ddplaunch.base.event_loop import Timer
from ddplaunch.core import events
from ddplaunch.observe.diagnosis.inspection import (
    CollectiveArrivals,
    Detail,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
)
from ddplaunch.observe.history import history_store, sample_file
from ddplaunch.observe.history.sample_file import MAX_BYTES, SampleFile, plan_file_name, sample_file_name
from ddplaunch.observe.samples.node import LATER, SAMPLE_INTERVAL_S, CounterSnapshot, SampleCollector
from ddplaunch.observe.samples.sample import GpuSample, NodeSample, RankSample
from tests.conftest import wait_until, write_program
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.features.runs.recorded_events import plan
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import LIGHT

TRAINS = """
    import os, time

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print("first", time.time(), flush=True)
    rank = dist.get_rank()
    over = torch.zeros(1)
    while not over:
        time.sleep(0.2 if rank == 1 else 0.01)
        over = torch.tensor([float(os.path.exists("over"))])
        dist.all_reduce(over)
"""


def kept():
    (name,) = history_store.list_runs()
    return sample_file.read_samples(os.path.join(history_store.run_dir(name), sample_file_name(0)))


def has_collectives(sample: NodeSample) -> bool:
    return any(each.collectives for each in sample.ranks)


@pytest.mark.ci
@pytest.mark.usefixtures("state")
def test_a_run_keeps_its_samples(start_ddplaunch, tmp_path):
    write_program(tmp_path, "trains.py", TRAINS)
    job = start_ddplaunch("run", "--nproc", "2", "--log-dir", "logs", "--metrics", "a.prom", "trains.py")
    wait_until(lambda: history_store.list_runs() and sum(has_collectives(each) for each in kept()) > 1, "two samples")
    (tmp_path / "over").touch()
    assert job.wait() == 0, job.stderr()
    found = kept()
    assert len(found) >= 2
    assert {each.attempt for each in found} == {0}
    last = found[-1]
    assert [each.rank for each in last.ranks] == [0, 1]
    for rank in last.ranks:
        assert 0 <= rank.cpus < 8
        assert rank.memory > 1 << 20
        assert 0 < rank.collectives < 7
    assert last.ranks[1].behind >= last.ranks[0].behind == 0
    (folder,) = (tmp_path / "logs").iterdir()
    (record,) = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"first_collective"' in line]
    began = min(float(line.split()[-1]) for line in job.stdout().splitlines())
    moment = float(record.rpartition(":")[2].strip(" }"))
    assert 0 < moment - began < 2, "the recorder knows it, not the look"


@pytest.mark.usefixtures("state")
def test_a_run_without_collectives_has_samples_too(start_ddplaunch, tmp_path):
    write_program(tmp_path, "short.py", "import os, time\nwhile not os.path.exists('over'): time.sleep(0.02)\n")
    job = start_ddplaunch("run", "--nproc", "2", *LIGHT, "short.py")
    wait_until(lambda: history_store.list_runs() and kept(), "a sample")
    (tmp_path / "over").touch()
    assert (job.wait(), job.stderr()) == (0, "")
    assert all(each.collectives is None for each in kept()[0].ranks)


@pytest.mark.ci
@pytest.mark.usefixtures("state")
def test_gpus_are_asked_in_a_child(request, start_ddplaunch, tmp_path):
    """The child is started again after a restart, which may have ended it."""
    program = """
        import os, sys, time
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        while not os.path.exists(f"read{attempt}"):
            time.sleep(0.05)
        sys.exit(attempt == "0")
    """
    write_program(tmp_path, "gpus.py", program)
    rates = {"FAKE_NVML_RATES": "87;12", "FAKE_NVML_POWER": "310;55"}
    words = ("--nproc", "gpu", "--max-restarts", "1", "--min-uptime", "0", *LIGHT, "gpus.py")
    job = start_ddplaunch(
        "run", *words, env={**request.getfixturevalue("fake_nvml").environ(2, ailing="1:91:64"), **rates}
    )
    for attempt in range(2):
        wait_until(
            lambda now=attempt: history_store.list_runs() and now in {each.attempt for each in kept()}, "a sample"
        )
        (tmp_path / f"read{attempt}").touch()
    assert job.wait() == 0, job.stderr()
    assert {each.attempt for each in kept()} == {0, 1}
    for each in kept():
        assert [(gpu.gpu, gpu.busy, gpu.power, gpu.slowed) for gpu in each.gpus] == [(0, 87, 310, 0), (1, 12, 55, 1)]


class Clock:
    """A loop of which the test says when its timer is due."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.due: Timer

    def call_later(self, seconds: float, callback) -> Timer:
        self.waits.append(seconds)
        self.due = Timer(callback, 0.0)
        return self.due

    def pass_on(self) -> None:
        self.due.callback()


def test_intervals_between_samples(monkeypatch):
    clock, received = Clock(), []
    taking = SampleCollector(clock, None, lambda event: None)
    taking.subscribe(lambda look, reading: received.append(reading))
    taking.observe(events.AttemptPlanned(plan(), 0))
    for rank in (0, 1):
        taking.observe(events.RankStarted(rank, os.getpid(), 0))
    for _ in range(8):
        clock.pass_on()
    assert clock.waits[1:] == [1, 1, 2, 4, 7, *[SAMPLE_INTERVAL_S] * 4]
    monkeypatch.setattr("ddplaunch.observe.samples.node.AFTER", 0.0)
    clock.pass_on()
    assert clock.waits[-1] == LATER
    assert len(received) == 10
    assert received[0] is None
    for rank in (0, 1):
        taking.observe(events.RankExited(rank, os.getpid(), 0, 0))
    clock.pass_on()
    assert received[-1] is None, "no rank runs"
    taking.observe(events.Restarting(1, 0.0, "again", None))
    taking.observe(events.AttemptPlanned(plan(), 1))
    clock.pass_on()
    assert received[-1] is None, "no rank runs"
    taking.observe(events.JobEnded(0, None))
    assert clock.due.callback is None


@pytest.mark.parametrize(
    ("entered", "arrived", "moment"),
    [
        ((0, 7), (), None),  # rank 0 has entered none
        ((7, 7), (1e9, 1e9 + 2), 1e9 + 2),
        ((7, 7), (1e9,), "now"),  # of one nothing is recorded
        ((7, 900), (1e9, 1e9), "now"),  # to report so many would take a rank too long
    ],
)
def test_when_the_first_collective_was(entered, arrived, moment):
    asked, samples, clock = [], [], Clock()

    def inspect(detail, done):
        asked.append(detail)
        ranks = (
            RankInspection(
                rank,
                "",
                os.getpid(),
                ProcessCondition.ALIVE,
                groups=(GroupState("0", count, 0),) if count else (),
                arrivals=tuple(CollectiveArrivals(rank, "0", "", 1, began, (5,)) for began in arrived[rank : rank + 1]),
            )
            for rank, count in enumerate(entered)
        )
        done(Inspection(0.0, tuple(ranks), 2))

    taking = SampleCollector(clock, inspect, samples.append)
    taking.subscribe(lambda look, reading: None)
    taking.observe(events.AttemptPlanned(plan(), 0))
    for rank in (0, 1):
        taking.observe(events.RankStarted(rank, os.getpid(), 0))
    before = time.time()
    for _ in range(3):
        clock.pass_on()
    assert clock.waits == [15, 1, 1, *([2, 4] if moment is None else [13, 15])], "until it is known"
    assert asked.count(Detail.LATENESS) == (max(entered) < 100 and moment is not None)
    moments = [each.moment for each in samples]
    if moment == "now":
        assert len(moments) == 1
        assert before <= moments[0] <= time.time()
    else:
        assert moments == ([] if moment is None else [moment])


class Kept:
    """A history with an open folder."""

    def __init__(self, path) -> None:
        self.folder: int | None = os.open(path, os.O_RDONLY)


def a_reading(number: int, ranks: int, gpus: int, chance: random.Random) -> NodeSample:
    rows = (
        RankSample(rank, chance.random() * 9, 1.234e11 * chance.random(), 1e8, 123456.0, 12.34, 0.5)
        for rank in range(ranks)
    )
    cards = (GpuSample(gpu, gpu, 99.0, 7.654e10, 654.3, 0.0) for gpu in range(gpus))
    return NodeSample(1e9 + 60.0 * number, 60.0, 0, tuple(rows), tuple(cards))


def keep(file: SampleFile, look: CounterSnapshot, found: NodeSample) -> None:
    """Have it kept, and wait for the thread that does."""
    file.on_sample(look, found)
    if file._writer:
        file._writer.join()


@pytest.mark.parametrize(("ranks", "gpus", "days"), [(1, 0, 1.5), (16, 4, 0.25)])
def test_samples_of_a_long_run_are_merged_to_fit(tmp_path, monkeypatch, ranks, gpus, days):
    """The file has a twelfth of the usual limit, and is full as much sooner."""
    assert MAX_BYTES < 2_000_000
    monkeypatch.setattr(sample_file, "MAX_BYTES", MAX_BYTES // 12)
    chance, history = random.Random(1), Kept(tmp_path)
    file, look = SampleFile(lambda: history.folder), CounterSnapshot(plan(), 0.0, 0.0)
    most, count = 0, int(days * 1440)
    for number in range(count):
        keep(file, look, a_reading(number, ranks, gpus, chance))
        most = max(most, file._size)
    os.close(history.folder)
    assert MAX_BYTES // 24 < most <= MAX_BYTES // 12
    assert sorted(os.listdir(tmp_path)) == [plan_file_name(0), sample_file_name(0)]
    kept_plan = sample_file.read_plan(str(tmp_path / plan_file_name(0)))
    assert kept_plan.ranks == ((0, "cpu", ""), (1, "cpu", ""))
    assert (tmp_path / sample_file_name(0)).stat().st_size == file._size
    found = sample_file.read_samples(str(tmp_path / sample_file_name(0)))
    assert len(found) > 50
    assert sum(each.seconds for each in found) == pytest.approx(60 * count)
    assert found[-1].time == 1e9 + 60 * (count - 1)


def test_incomplete_and_hostile_lines_of_samples_are_skipped(tmp_path):
    good = a_reading(1, 2, 1, random.Random(1)).to_json()
    lines = [good[: len(good) // 2], "null", '{"time": 1e999}', "[" * 5000, '{"time": "x"}', good.strip()]
    for figures in "1e308, 1.0", "9.0, -1e308":
        moment, seconds = figures.split(", ")
        lines.append(f'{{"time": {moment}, "seconds": {seconds}, "attempt": 0, "ranks": []}}')
    path = tmp_path / "readings-0.jsonl"
    path.write_text("\n".join(lines))
    (found,) = sample_file.read_samples(str(path))
    assert found.ranks[1].rank == 1
    assert sample_file.read_samples(str(tmp_path / "missing")) == []
    os.mkfifo(tmp_path / "fifo")
    assert sample_file.read_samples(str(tmp_path / "fifo")) == []


def test_a_sample_file_that_cannot_be_written_is_ignored(tmp_path):
    history = Kept(tmp_path)
    (tmp_path / sample_file_name(0)).symlink_to(tmp_path / "elsewhere")
    file, look = SampleFile(lambda: history.folder), CounterSnapshot(plan(), 0.0, 0.0)
    keep(file, look, a_reading(1, 1, 0, random.Random(1)))
    os.close(history.folder)
    assert not (tmp_path / "elsewhere").exists()
    history.folder = None
    keep(file, look, a_reading(2, 1, 0, random.Random(1)))


def test_a_disk_that_hangs_does_not_delay_the_job(tmp_path):
    """A sample is omitted while the one before is being written."""
    history = Kept(tmp_path)
    file, look = SampleFile(lambda: history.folder), CounterSnapshot(plan(), 0.0, 0.0)
    begun, hangs = threading.Event(), threading.Event()

    def write(folder: int, *words: object) -> None:
        begun.set()
        hangs.wait(scaled_timeout(30))
        os.close(folder)

    file._write_sample = write
    file.on_sample(look, a_reading(1, 1, 0, random.Random(1)))
    assert begun.wait(scaled_timeout(10))
    first = file._writer
    file.on_sample(look, a_reading(2, 1, 0, random.Random(1)))
    assert file._writer is first
    assert first.is_alive()
    hangs.set()
    first.join()
    os.close(history.folder)
