"""Tests of traces: of reading those of torch, with made-up files, among which are hostile ones, and of ours."""

import json

import pytest

from ddplaunch.features.profile.profile_files import perfetto_trace
from ddplaunch.features.profile.rank_profile import CollectiveKind, RankProfile
from ddplaunch.features.profile.torch_trace import torch_events


def events(tmp_path, content):
    path = tmp_path / "torch.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return list(torch_events(str(path), 3, zero=1000.0))


def test_threads_and_streams_are_tracks_of_the_rank(tmp_path):
    def named(what, pid, tid, args):
        return {"ph": "M", "name": what, "ts": 0.0, "pid": pid, "tid": tid, "args": args}

    output = events(
        tmp_path,
        {
            "baseTimeNanoseconds": 999_000_000_000,
            "traceEvents": [
                named("process_name", 4711, 0, {"name": "python"}),
                named("process_labels", 4711, 0, {"labels": "CPU"}),
                named("process_labels", 1, 0, {"labels": "GPU 1"}),
                named("thread_name", 4711, 7, {"name": "thread 7 (python)"}),
                named("thread_name", 1, 7, {"name": "stream 7"}),
                {"ph": "X", "name": "aten::add", "pid": 4711, "tid": 7, "ts": 1_500_000.5, "dur": 2.0},
                {"ph": "X", "name": "add_kernel", "pid": 1, "tid": 7, "ts": 1_500_003.0, "dur": 1.0},
                {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 5, "pid": 4711, "tid": 7, "ts": 1_500_000.5},
                {"ph": "X", "name": "PyTorch Profiler", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 0, "dur": 9},
            ],
        },
    )
    assert {each["pid"] for each in output} == {3}
    threads = {each["tid"]: each["args"]["name"] for each in output if each["ph"] == "M"}
    assert sorted(threads.values()) == ["torch: CPU thread 7 (python)", "torch: GPU 1 stream 7"]
    slices = {each["name"]: (each["ts"], threads[each["tid"]]) for each in output if each["ph"] == "X"}
    assert slices == {
        "aten::add": (500_000.5, "torch: CPU thread 7 (python)"),
        "add_kernel": (500_003.0, "torch: GPU 1 stream 7"),
    }
    assert [each["id"] for each in output if each["ph"] == "s"] == ["3.5"]


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{", {}, {"baseTimeNanoseconds": "x"}, {"baseTimeNanoseconds": 1, "traceEvents": [7]},
     {"baseTimeNanoseconds": 1, "traceEvents": [{"pid": 1}]}],
)  # fmt: skip
def test_malformed_files_have_no_events(tmp_path, content):
    assert events(tmp_path, content) == []


def test_collectives_of_a_rank_that_overlap_are_in_lanes():
    """One whose end is not recorded ends when its last rank enters it."""
    kinds = (CollectiveKind("0", "", "all_reduce", "float32[6]"),)
    calls = (0, 1, 0, 2000, 0, 2, 1000, 0, 0, 3, 4000, 5000), (0, 2, 3000, 0)
    profiles = [RankProfile(rank, "", began=10.0, kinds=kinds, calls=each) for rank, each in enumerate(calls)]
    slices = [each for each in perfetto_trace(profiles, {}) if each["ph"] == "X"]
    found = [[each["pid"], each["tid"], round(each["ts"]), round(each["dur"])] for each in slices]
    first = found[0][1]
    assert found == [[0, first, 0, 2000], [0, first + 1, 1000, 2000], [0, first, 4000, 1000], [1, first, 3000, 0]]
    assert {each["args"]["group"] for each in slices} == {"0"}
    assert [each["args"]["ends"] == "when it completed" for each in slices] == [True, False, True, False]


def test_time_zero_is_the_first_event_of_all_ranks(tmp_path):
    """Torch's profiler begins before ours, on a clock of its host; a time that cannot be is not looked at."""

    def write(name: str, began: float) -> str:
        path = tmp_path / name
        track = {"pid": 4711, "tid": 7}
        named = {"ph": "M", "name": "thread_name", "ts": 0.0, **track, "args": {"name": "main"}}
        labelled = {**named, "name": "process_labels", "args": {"labels": "CPU"}}
        begins = [began + 0.5, began, began + 0.7]
        called = [{"ph": "X", "name": "add", **track, "ts": (each - 900) * 1e6, "dur": 2.0} for each in begins]
        content = {"baseTimeNanoseconds": 900_000_000_000, "traceEvents": [named, labelled, *called]}
        path.write_text(json.dumps(content))
        return str(path)

    def begins(files: dict[int, str]) -> list[float]:
        kinds = (CollectiveKind("0", "", "all_reduce", "float32[6]"),)
        profiles = [
            RankProfile(rank, "", began=1000.0, clock_offset_s=100.0 * rank, kinds=kinds, calls=(0, 1, 0, 2000))
            for rank in range(2)
        ]
        found = [each for each in perfetto_trace(profiles, files) if each["ph"] == "X"]
        return sorted(round(each["ts"] / 1e6, 3) for each in found)

    files = {0: write("0", began=999.5), 1: write("1", began=1099.0)}
    assert begins(files) == [0, 0.5, 0.5, 0.7, 1, 1, 1, 1.2]
    (tmp_path / "broken").write_text("{")
    assert begins({0: str(tmp_path / "broken")}) == [0, 0]
    assert begins({0: write("far", began=100.0)})[-2:] == [60, 60]
