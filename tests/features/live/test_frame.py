"""Tests of the live view's frames, drawn from made-up data."""

import re
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from ddplaunch.base.event_loop import EventLoop
from ddplaunch.base.tty import BACKSPACE, ENTER, ESCAPE
from ddplaunch.core.control_socket.job_status import JobState, RankState, RankStatus, Status
from ddplaunch.features.live import command, live_view
from ddplaunch.features.live.frame import (
    MAX_FOOTER_ROWS,
    build_table_rows,
    format_ranks,
    render_footer,
    render_full_screen,
)
from ddplaunch.features.live.live_view import DOWN, UP, LiveView
from ddplaunch.features.live.rank_table import COLUMNS, SORT_KEYS
from ddplaunch.features.live.styled_rows import (
    StyledText,
    display_width,
    render_plain_text,
    render_row,
    row_width,
    truncate_row,
    wrap_parts,
    wrap_text,
)
from ddplaunch.features.live.view_state import (
    JobSnapshot,
    RankActivity,
    TrendLine,
    ViewState,
    busy_cpus_by_rank,
    collectives_per_second,
    correct_completed_counts,
    describe_location,
    mark_moved,
    rank_activities,
    rank_activity,
    waiting_ranks,
)
from ddplaunch.observe.diagnosis.inspection import (
    ActiveCall,
    Collective,
    Detail,
    Frame,
    GroupState,
    Inspection,
    ProcessCondition,
    RankInspection,
    Thread,
)
from ddplaunch.observe.output_lines import last_output_line
from ddplaunch.observe.request import JobInspection
from ddplaunch.observe.samples.sample import GpuSample, NodeSample, RankSample
from ddplaunch.system.devices.gpu_usage import GpuUsage
from ddplaunch.system.devices.process_usage import ProcessUsage
from tests.observe.diagnosis.recorded_hangs import C10D

GIB = 1 << 30


def rank(number: int, enqueued: int = 10, completed: int = 10, **what) -> RankInspection:
    groups = (GroupState("0", enqueued, completed),)
    return replace(
        RankInspection(number, "n0", 100 + number, ProcessCondition.ALIVE, answers=True, groups=groups), **what
    )


def snapshot(*ranks: RankInspection, state: JobState = JobState.RUNNING, **what) -> ViewState:
    known = tuple(RankStatus(each.rank, each.pid, RankState.RUNNING) for each in ranks)
    status = Status("mine", "train.py", 1, 0, len(ranks), began=0.0, since=1.0, attempt=0, state=state, ranks=known)
    return ViewState(JobSnapshot(status, Inspection(3751.0, ranks, len(ranks))), **what)


def later(one: ViewState, **what) -> ViewState:
    """A view with other fields of its current snapshot."""
    return replace(one, current=replace(one.current, **what))


def hanging(count: int, absent: int = 2, **what) -> ViewState:
    """Ranks that wait in collective 11, but one."""
    ranks = [rank(number, 11 - (number == absent), 10) for number in range(count)]
    return snapshot(*ranks, **what)


def shown(one: ViewState, across: int = 80, down: int = 24) -> list[str]:
    return render_plain_text(render_footer(one, across, down)).splitlines()


def inside(name: str, operation: str, other: int | None = None, **what) -> RankInspection:
    return rank(0, inside=ActiveCall(name, operation, other), **what)


def ended_with(code: int | None = None) -> RankInspection:
    return rank(0, condition=ProcessCondition.EXITED, code=code)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (rank(0), "RUNNING"),
        (rank(0, 11, 10), "WAITING"),
        (rank(0, 11, 10, moved=True), "RUNNING"),
        (inside("recv", "recv", 1), "WAITING"),
        (inside("send_object_list", "send", 1), "WAITING"),
        (inside("monitored_barrier", "monitored_barrier"), "WAITING"),
        (inside("recv", "recv", 1, moved=True), "RUNNING"),
        (inside("all_reduce", "all_reduce"), "RUNNING"),
        (inside("all_reduce", "all_reduce", groups=()), "WAITING"),
        (rank(0, 11, 10, answers=False), "SILENT"),
        (rank(0, groups=(), answers=None), "RUNNING"),
        (rank(0, 11, 10, condition=ProcessCondition.STOPPED), "STOPPED"),
        (rank(0, condition=ProcessCondition.BLOCKED), "BLOCKED"),
        (ended_with(0), "ENDED"),
        (ended_with(3), "FAILED"),
        (ended_with(-signal.SIGKILL), "FAILED"),
    ],
)
def test_activity_of_a_rank(found, expected):
    assert rank_activity(found, None, JobState.RUNNING) is RankActivity[expected]


@pytest.mark.parametrize(
    ("found", "status", "state", "expected"),
    [
        (inside("init_process_group", "_store_based_barrier", groups=(), answers=None), None, "STARTING", "WAITING"),
        (rank(0, condition=ProcessCondition.PENDING), None, "STARTING", "PENDING"),
        (ended_with(), RankStatus(0), "STARTING", "PENDING"),
        (ended_with(), None, "JOINING", "PENDING"),
        (ended_with(-signal.SIGSEGV), None, "STOPPING", "FAILED"),
        (ended_with(-signal.SIGTERM), None, "STOPPING", "ENDED"),
        (ended_with(), RankStatus(0, 0, RankState.UNABLE), "STOPPING", "FAILED"),
        (rank(0), RankStatus(0, 100, RankState.EXITED, 3), "RUNNING", "FAILED"),
        (rank(0, 11, 10), None, "ENDED", "ENDED"),
    ],
)
def test_activity_of_a_rank_with_its_status(found, status, state, expected):
    assert rank_activity(found, status, JobState[state]) is RankActivity[expected]


def test_the_view_of_a_hang():
    expected = "ranks 0, 1, 3 wait in all_reduce #11 of default_pg (float32[6]), entered at train.py:88; rank 2 has not"
    one = hanging(
        4, sentences=(expected,), gpus=(GpuUsage(0, 80, 40 * GIB, 80 * GIB), GpuUsage(1, 98, 71 * GIB, 80 * GIB))
    )
    one = replace(one, previous=JobSnapshot(one.current.status, replace(one.current.inspection, moment=3750.0)))
    assert shown(one) == [
        "running 1:02:31 | 0 collectives/s | 3 of 4 ranks waiting | CPU 0 %",
        "2 GPUs 80-98 % 40-71 of 80 GiB",
        "ranks 0, 1, 3 wait in all_reduce #11 of default_pg (float32[6]), entered at",
        "  train.py:88; rank 2 has not",
        ". running: rank 2   w waiting: 3 ranks",
        "0 ww.w",
    ]


def test_a_wait_without_a_sentence():
    last = (Collective("0", 11, "all_gather", "float32[6]", 600.0, 0.0, False, True),)
    one = hanging(4)
    ranks = (replace(one.current.inspection.ranks[0], last=last), *one.current.inspection.ranks[1:])
    assert "3 of 4 ranks waiting in #11 of default_pg" in shown(one)[0]
    output = shown(later(one, inspection=replace(one.current.inspection, ranks=ranks)))
    assert "ranks waiting in all_gather #11 of default_pg" in output[0]


def test_a_wait_outside_collectives():
    one = hanging(3)
    ranks = (*one.current.inspection.ranks[:2], rank(2, 10, 10, inside=ActiveCall("recv", "recv", 0)))
    one = later(one, inspection=replace(one.current.inspection, ranks=ranks))
    assert waiting_ranks(one.current.inspection) == {(0, ("0", 11, "")), (1, ("0", 11, "")), (2, ("", 0, "recv"))}
    assert shown(one)[-1] == "0 www"
    assert any(
        row.rstrip().endswith(" recv") for row in render_plain_text(render_full_screen(one, 80, 24)).splitlines()
    )


def test_ranks_in_rare_states_come_first():
    ranks = [rank(number) for number in range(64)]
    ranks[7] = replace(ranks[7], condition=ProcessCondition.STOPPED)
    ranks[9] = replace(ranks[9], condition=ProcessCondition.EXITED, code=3)
    ranks[11] = rank(11, 11, 10)
    _, *legend, cells = shown(snapshot(*ranks))
    assert legend == ["X failed: rank 9   T stopped: rank 7   w waiting: rank 11   . running: 61 ranks"]
    assert cells == " 0 .......T .X.w.... ........ ........ ........ ........ ........ ........"


def test_512_ranks_in_a_few_rows():
    rows = shown(hanging(512))
    assert len(rows) == MAX_FOOTER_ROWS
    assert rows[1].endswith("w waiting: 511 ranks   (a cell is 2 ranks)")
    assert rows[2] == "  0 w.wwwwww" + " wwwwwwww" * 7
    assert rows[-1].startswith("384 ")


@pytest.mark.parametrize("count", [1, 4, 64, 1000])
@pytest.mark.parametrize("across", [1, 40, 80])
@pytest.mark.parametrize("down", [1, 5, 24])
def test_the_view_fits_a_terminal_of_any_size(count, across, down):
    one = hanging(count, sentences=("日本 " * 50,), hint="x" * 100)
    rows = render_footer(one, across, down)
    assert 1 <= len(rows) <= min(MAX_FOOTER_ROWS, max(1, down - 1))
    assert all(row_width(row) <= max(1, across - 1) for row in rows)
    rows = render_full_screen(one, across, down)
    assert len(rows) == down
    assert all(row_width(row) <= max(1, across - 1) for row in rows)


@pytest.mark.parametrize(
    ("down", "kept"), [(2, "s"), (3, "sl"), (4, "slc"), (5, "s1lc"), (6, "s12lc"), (7, "s12lc"), (24, "s12lc")]
)
def test_the_rows_that_a_small_terminal_keeps(down, kept):
    told = "ranks 0, 1, 3 wait in all_reduce #11 of default_pg (float32[6]), entered at train.py:88; rank 2 has …"
    rows = {
        "s": "running 1:02:31 | 3 of 4 ranks waiting",
        "1": "ranks 0, 1, 3 wait in all_reduce #11 of default_pg" + " …" * (down == 5),
        "2": "  (float32[6]), entered at train.py:88; rank 2 has …",
        "l": ". running: rank 2   w waiting: 3 ranks   ? help",
        "c": "0 ww.w",
    }
    assert shown(hanging(4, sentences=(told,), hint="keys"), 60, down) == [rows[each] for each in kept]


@pytest.mark.parametrize(
    ("column", "texts"),
    [
        ("late", {0.0004: "0", 0.0006: "1ms", 0.9994: "999ms", 0.9996: "1.0s"}),
        ("coll/s", {0.0: "0", 0.04: "0.0", 9.94: "9.9", 9.96: "10", 99_999: "99999", 100_000: "100k"}),
        ("mem", {999 << 20: "999M", 1000 << 20: "1.0G", 10 * GIB: "10G", 1000 * GIB: "1.0T", 1 << 60: "1024P"}),
    ],
)
def test_figures_of_the_table(column, texts):
    assert {figure: COLUMNS[column].format(figure) for figure in texts} == texts


def test_rates():
    before = Inspection(10.0, (rank(0, 5, 5, cpu=1.0), rank(1, 5, 5, cpu=1.0)), 2)
    now = Inspection(12.0, (rank(0, 25, 25, cpu=2.0), rank(1, 24, 24, cpu=4.0)), 2)
    one = later(snapshot(*now.ranks), inspection=now)
    earlier = replace(one.current, inspection=before)
    assert collectives_per_second(one) is collectives_per_second(replace(one, previous=one.current)) is None
    one = replace(one, previous=earlier)
    assert collectives_per_second(one) == 10.0
    assert busy_cpus_by_rank(one) == {0: 0.5, 1: 1.5}
    # What this machine says of whole trees counts more; a rank that was started again begins anew.
    used = replace(
        later(one, usage={0: ProcessUsage(9.0, GIB)}), previous=replace(earlier, usage={0: ProcessUsage(1.0, GIB)})
    )
    assert busy_cpus_by_rank(used) == {0: 4.0, 1: 1.5}
    assert busy_cpus_by_rank(replace(used, previous=earlier)) == {0: 0.5, 1: 1.5}
    again = replace(now, ranks=(replace(now.ranks[0], pid=7, groups=()), replace(now.ranks[1], pid=8)))
    assert collectives_per_second(later(one, inspection=again)) is None
    assert busy_cpus_by_rank(later(one, inspection=again)) == {}
    assert "1.0 GiB here" in shown(used)[0]


def test_ranks_that_have_not_moved_since_the_last_inspection():
    looks = [Inspection(float(moment), (rank(0, 11, 10), rank(1, 10 + moment, 9 + moment)), 2) for moment in range(2)]
    assert waiting_ranks(mark_moved(looks[0], None)) == set()
    assert [number for number, _ in waiting_ranks(mark_moved(looks[1], looks[0]))] == [0]


def test_a_rank_whose_counter_stays_behind_does_not_wait():
    """Two threads of gloo may write the number of the last completed collective in the wrong order."""
    all_reduce, load_batch = (
        (Thread((Frame(function, file, 1, own),)),)
        for function, file, own in (("all_reduce", C10D, False), ("load_batch", "data.py", True))
    )
    counters = [rank(0, 11, 10), rank(1, 11, 10), rank(2, 10, 9)]
    stacks = [replace(each, threads=load_batch if each.rank == 2 else all_reduce) for each in counters]
    before = None
    for ranks in (stacks, counters, counters):
        before = correct_completed_counts(Inspection(1.0, tuple(ranks), 3), before)
        assert [number for number, _ in sorted(waiting_ranks(before))] == [0, 1]
    later_on = correct_completed_counts(Inspection(1.0, (*counters[:2], rank(2, 11, 10)), 3), before)
    assert [number for number, _ in sorted(waiting_ranks(later_on))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("chosen", "left"),
    [("2", {2}), ("0,2-3", {0, 2, 3}), ("wait", {0, 1, 3}), ("runn", {2}), ("N0", {0, 1, 2, 3}), ("9", {}), ("-", {})],
)
def test_filters(chosen, left):
    one = hanging(4, filter_text=chosen)
    assert set(rank_activities(one)) == {*left}
    assert render_footer(one, 80, 24)
    assert render_full_screen(one, 80, 24)


@pytest.mark.parametrize(
    ("gpus", "text"),
    [
        ((), None),
        (None, "GPU ?"),
        ((GpuUsage(0, 87, 41 * GIB, 80 * GIB),), "GPU 87 % 41 of 80 GiB"),
        ((GpuUsage(0, None, None, None),), "GPU ? %"),
        ((GpuUsage(0, 5, GIB, None), GpuUsage(1, None, None, None)), "2 GPUs 5 % 1 GiB"),
    ],
)
def test_the_load_of_gpus_is_summarized(gpus, text):
    found = [row for row in shown(snapshot(rank(0), rank(1), gpus=gpus)) if "GPU" in row]
    assert found[0].endswith(f"| {text}") if text else not found


def test_the_exit_code_is_shown():
    one = snapshot(rank(0), rank(1), state=JobState.ENDED)
    one = later(one, status=replace(one.current.status, code=3, since=3800.0, attempt=1))
    assert shown(one)[0] == "ended, exit code 3 1:03:20 | attempt 2"


def test_control_characters_are_escaped():
    bad = "\x1b]0;evil\x07"
    last = (Collective("0", 11, bad, bad, 600.0, 0.0, False, True),)
    one = snapshot(rank(0, 11, 10, host=bad, last=last), rank(1, host="x"), sentences=(bad,), filter_text="")
    one = later(one, status=replace(one.current.status, run_id=bad, target=bad))
    for rows in (render_footer(one, 80, 24), render_full_screen(one, 80, 24)):
        assert "\x1b" not in render_plain_text(rows)


def test_names_of_ranks():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([0, 1, 2, 8]) == "ranks 0-2, 8"
    assert format_ranks(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_rows_are_truncated_by_display_width():
    row = (StyledText("abc", "31"), StyledText("日本"))
    assert (display_width("日本"), row_width(row)) == (4, 7)
    assert (
        render_plain_text([truncate_row(row, 6), truncate_row(row, 4), truncate_row(row, 1), truncate_row(row, 0)])
        == "abc日…\nabc…\n…\n\n"
    )
    assert render_row(row, True) == "\x1b[31mabc\x1b[0m日本"
    assert (
        render_plain_text(wrap_parts([(StyledText("aa"),), (StyledText("bb"),), (StyledText("c" * 20),)], 8))
        == "aa | bb\nccccccc…\n"
    )
    assert render_plain_text(wrap_text("one two three four", 9, 2)) == "one two\nthree fo…\n".replace(
        "three fo…", "three …"
    )


def full(one: ViewState, across: int = 80, down: int = 24) -> list[str]:
    return render_plain_text(render_full_screen(one, across, down)).splitlines()


def busy_job(count: int, **what) -> ViewState:
    """A view in which every column has values."""
    one = snapshot(*(rank(number, 50 + number, 50 + number, cpu=2.0) for number in range(count)), **what)
    before = Inspection(3750.0, tuple(rank(number, 10, 10, cpu=1.0) for number in range(count)), count)
    used = {number: ProcessUsage(2.0, (number + 1) * 100 << 20) for number in range(count)}
    outputs = {number: f"step {number} loss 0.{number}" for number in range(count)}
    gpus = tuple(GpuUsage(number, 90 + number, 40 * GIB, 80 * GIB, (100 + number,)) for number in range(count))
    now = replace(one.current, usage=used, last_lines=outputs)
    earlier = JobSnapshot(one.current.status, before, {number: ProcessUsage(1.0, 0) for number in range(count)})
    places = {number: "all_reduce train.py:88" for number in range(count)}
    late = {number: 0.038 if number == 1 else 0.0 for number in range(count)}
    trends = {name: TrendLine() for name in ("collectives/s", "CPU %", "GPU %")}
    for trend in trends.values():
        for value in (0.0, 50.0, 100.0):
            trend.add(value)
    return replace(one, current=now, previous=earlier, gpus=gpus, locations=places, lateness_s=late, trends=trends)


def test_the_columns_of_the_table():
    rows = full(busy_job(2, hint="? help"))
    assert rows[0] == "mine: train.py"
    assert rows[1] == "running 1:02:31 | 300 MiB | 2 GPUs 90-91 % 40 of 80 GiB"
    assert rows[2] == "collectives/s 100 ▁▅█     CPU % 100 ▁▅█             GPU % 100 ▁▅█"
    assert rows[4] == "rank   CPU%  late coll/s  mem GPU% GPUmem doing              last line"
    assert rows[5] == "   0 .  100     0     40 100M   90    40G all_reduce train.… step 0 loss 0.0"
    assert rows[6] == "   1 .  100  38ms     41 200M   91    40G all_reduce train.… step 1 loss 0.1"
    wide = full(busy_job(2), 200, 60)
    assert re.fullmatch(
        r"   1  running    100   38ms      41  200M    91     40G      101  all_reduce train.py:88 +step 1.*", wide[6]
    )


def test_the_rank_that_others_wait_for_is_red_and_first():
    one = hanging(4, awaited=frozenset({2}))
    assert shown(one)[-2:] == ["! awaited: rank 2   w waiting: 3 ranks", "0 ww!w"]
    assert [row.split()[0] for row in full(one) if row.strip()[:1].isdecimal()] == ["2", "0", "1", "3"]
    by_number = full(replace(one, sort_by="rank"))
    assert [row.split()[0] for row in by_number if row.strip()[:1].isdecimal()] == ["0", "1", "2", "3"]
    assert any(part.style == "1;31" for row in render_footer(one, 80, 24) for part in row if part.text == "!")


def test_tabs_keep_the_columns_of_the_table():
    one = busy_job(2)
    one = replace(one, locations={}, current=replace(one.current, last_lines={0: "step\t7", 1: "step\t8"}))
    assert [row.partition("step")[2] for row in full(one)[5:7]] == ["    7", "    8"]


def test_sentences_are_not_cut():
    expected = "rank 3 " + "waits for a rank that does not arrive " * 5 + "at all"
    rows = full(replace(busy_job(4, hint="? help"), sentences=(expected,)), 40, 10)
    assert expected in " ".join(row.strip() for row in rows)
    assert re.match("   0 [.] ", rows[-1])


def test_the_table_scrolls_to_the_chosen_rank():
    one = busy_job(64)
    assert " 0 ........" in "\n".join(full(one))
    assert not any(row.startswith("  40 ") for row in full(one))
    chosen = [
        row for row in render_full_screen(replace(one, cursor=40), 80, 24) if row and row[0].text.startswith("  40")
    ]
    assert all("7" in span.style.split(";") for span in chosen[0] if span.text.strip())


@pytest.mark.parametrize(
    ("order", "first"),
    [("rank", 0), ("state", 0), ("CPU%", 0), ("late", 1), ("coll/s", 3), ("mem", 3), ("GPU%", 3), ("GPUmem", 0)],
)
def test_the_table_is_sorted_by_each_column(order, first):
    assert order in SORT_KEYS
    one = replace(busy_job(4), sort_by=order)
    assert build_table_rows(one, rank_activities(one))[0].rank.rank == first


def test_the_points_of_a_trend_are_bounded():
    trend = TrendLine()
    for number in range(10_000):
        trend.add(float(number))
    assert len(trend.means) <= TrendLine.MAX_POINTS
    assert trend.render(8) == "▁▂▃▄▅▆▇█"
    assert TrendLine().render(8) == ""
    assert trend.render(0)


def test_the_location_of_a_rank():
    frames = (Frame("load", "data.py", 3, True), Frame("<module>", "train.py", 9, True))
    assert describe_location(rank(0, threads=(Thread(frames),))) == "load data.py:3"
    assert describe_location(rank(0, threads=(Thread(frames[1:]),))) == "train.py:9"
    assert describe_location(rank(0)) == ""


@pytest.mark.parametrize(
    ("printed", "last"),
    [
        (b"one\ntwo\n\n", "two"),
        (b"one\n\rbar 1\rbar 2", "bar 2"),
        (b"", ""),
        (b"\x1b[31mred\xff\n", "red\ufffd"),
        (b"x" * 5000, "x" * 199 + "…"),
    ],
)
def test_the_last_line_of_an_output(printed, last):
    assert last_output_line(printed) == last


@pytest.mark.parametrize("days", [0.01, 1, 30])
def test_a_trend_starts_with_recorded_samples(days):
    count = int(days * 5760)
    trend = TrendLine()
    trend.seed([(15.0, 10.0)] * count + [(15.0, 40.0)] * count)
    assert 100 <= len(trend.means) <= TrendLine.MAX_POINTS
    assert sum(trend.means) / len(trend.means) == pytest.approx(25, abs=0.5)
    before = len(trend.means)
    trend.add(7.0)
    assert len(trend.means) == before + (trend._each == 1)


def test_a_view_starts_with_recorded_samples():
    rows = tuple(RankSample(rank, 0.5, 1e9, 0.0, 0.0, 12.0 + rank, 0.0) for rank in (0, 1))
    view = LiveView(EventLoop(), None, None, on_quit=lambda: None)
    view.add_earlier_samples([NodeSample(1e9, 15.0, 0, rows, (GpuSample(0, 0, 80.0, 1.0, 1.0, 0.0),))] * 4)
    assert [len(each.means) for each in view._trends.values()] == [60] * 3
    assert [each.means[-1] for each in view._trends.values()] == [13.0, 100.0, 80.0]


def test_the_trends_begin_with_the_samples_of_the_run(monkeypatch):
    earlier = {"/runs/r/readings-1.jsonl": [NodeSample(0.0, 3.0, 0, ())]}
    monkeypatch.setattr(command, "job_at", str)
    monkeypatch.setattr(command, "_make_screen", lambda loop: None)
    monkeypatch.setattr(command, "SocketJobSource", lambda *arguments: None)
    monkeypatch.setattr(command, "find_record", lambda job: SimpleNamespace(node_rank=1, run="r"))
    monkeypatch.setattr(command.history_store, "run_dir", lambda run: f"/runs/{run}")
    monkeypatch.setattr(command.sample_file, "read_samples", earlier.get)
    assert command.TopViewer("", "")._view._trends["CPU %"].means == [0.0] * 3


class Terminal:
    """A live view of four ranks at a screen and a job that note what is requested."""

    is_full_screen = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[object] = []
        self._on_reply: dict[Detail, Callable[[JobInspection], None]] = {}
        query = SimpleNamespace(query=lambda: None, close=lambda: None, usage=())
        monkeypatch.setattr(live_view, "GpuUsageQuery", lambda loop: query)
        self.now, self.advice = 100.0, ""
        monkeypatch.setattr(live_view, "time", SimpleNamespace(monotonic=lambda: self.now))
        job = SimpleNamespace(
            inspect=self._inspect,
            stop=lambda: self.requests.append("stop"),
            log=lambda rank, on_reply: on_reply(f"log of {rank}"),
            failures=lambda on_reply: on_reply("failures"),
            advice_to_continue=lambda: self.advice,
        )
        quits, commands = (lambda: self.requests.append("quit")), (lambda *words: self.requests.append(words))
        view: Any = LiveView
        self.view = view(self, self, job, on_quit=quits, run_command=commands)
        self.view.start(keys=True)
        self.reply(snapshot(*map(rank, range(4))))
        assert self.take() == [(Detail.STATE, False)]

    def call_later(self, seconds: float, callback: Callable[[], None]) -> SimpleNamespace:
        self._on_timer = callback
        return SimpleNamespace(cancel=lambda: None)

    def _inspect(self, detail: Detail, on_reply: Callable[[JobInspection], None], *, lines: bool = False) -> None:
        self.requests.append((detail, lines))
        self._on_reply[detail] = on_reply

    def reply(self, now: ViewState, detail: Detail = Detail.STATE) -> list[str]:
        """Answer the last request for this detail; return the rows."""
        self._on_reply[detail](JobInspection(now.current.status, now.current.inspection, ()))
        return self.rows(80, 24)

    def take_at(self, now: float) -> list[object]:
        """Let the timer expire at a moment; return what was requested since."""
        self.now = now
        self._on_timer()
        return self.take()

    def begin(self, render: object, on_key: Callable[[str], object]) -> None:
        self._on_key = on_key

    def refresh(self) -> None: ...

    def set_full_screen(self, on: bool) -> None:
        self.is_full_screen = on

    def print_text(self, text: str) -> None:
        self.requests.append(text)

    def take(self, *keys: str) -> list[object]:
        """Type keys; return what was requested since."""
        for key in keys:
            self._on_key(key)
        requests, self.requests = self.requests, []
        return requests

    def rows(self, columns: int, rows: int) -> list[str]:
        return ["".join(part.text for part in row) for row in self.view._render(columns, rows, self.is_full_screen)]


def test_keys_request_what_they_say(monkeypatch):
    each = Terminal(monkeypatch)
    assert each.take("l", "1", "2", BACKSPACE, ENTER, "f", "s", "p", "x", "n", "x", "y", "q") == [
        *("log of 1", "failures", (Detail.WAITS, False), ("profile", "--seconds", "5"), "stop", "quit")
    ]
    assert each.take("l", "x", ENTER, "l", ENTER, "l", "3", ESCAPE, "d", ENTER, "o", DOWN[0], ENTER) == []
    each.take("/", *"2\x01-3")
    assert each.rows(24, 9)[-1] == "filter: 0,3-5, or a wo…"
    each.take(ENTER, "z", DOWN[0])
    assert each.take(DOWN[0], UP[0], DOWN[0], DOWN[0], "d", ENTER) == [("debug", "--rank", "3"), (Detail.STACKS, False)]
    each.take("l", ENTER)
    assert each.rows(30, 4) == ["log of 3", "", "", "Esc back  Up, Down"]
    each.take("?", *DOWN[:1] * 99)
    assert max(map(len, last := each.rows(30, 6))) <= 29
    assert last[-2].split()[-1] == live_view.help_text().split()[-1]
    each.take(UP[0])
    assert each.rows(30, 6)[1:5] == last[:4]
    each.take(*UP[:1] * 99)
    assert each.rows(30, 6)[0].startswith("  s  stacks")
    each.take(ESCAPE)
    assert (each.is_full_screen, "rank" in "".join(each.rows(60, 12))) == (True, True)
    each.take(ESCAPE)
    assert not each.is_full_screen


def test_o_sorts_by_one_key_after_the_other(monkeypatch):
    each = Terminal(monkeypatch)
    each.take("z")
    for order in (*SORT_KEYS[1:], *SORT_KEYS[:2]):
        each.take("o")
        assert f"  o order: {order}  " in each.rows(120, 24)[-1]


def test_the_view_is_refreshed_once_a_second(monkeypatch):
    each, free, state = Terminal(monkeypatch), snapshot(*map(rank, range(4))), (Detail.STATE, False)
    assert (each.take_at(101), each.take_at(102), each.take_at(103)) == ([state], [], [])
    assert each.rows(80, 24)[-1] == "0 ...."
    assert (each.take_at(104), each.rows(80, 24)[-1]) == ([], "no answer for 3 s")
    each.advice = "continue it"
    assert (each.take_at(105), each.rows(80, 24)[-1]) == ([], "suspended: continue it")
    assert each.rows(80, 24)[0].startswith("suspended 1:02:31")
    each.advice = ""
    assert each.reply(free)[-1] == "0 ...."

    # Lateness is measured after 10 s, and every 30 s; not while ranks wait.
    assert each.take_at(110) == [state]
    each.reply(free)
    assert each.take_at(111) == [(Detail.LATENESS, False), state]
    slow = later(free, inspection=replace(free.current.inspection, pace=("rank 1 was last",)))
    each.reply(slow, Detail.LATENESS)
    assert "rank 1 was last" in each.reply(free)

    # Stacks are requested while ranks wait, every 5 s.
    stacks = (Thread((Frame("all_reduce", C10D, 1, own=False),)),), (Thread((Frame("load", "data.py", 3, own=True),)),)
    waits = snapshot(*(rank(number, 11 - (number == 2), 10) for number in range(4)))
    whole = snapshot(*(replace(one, threads=stacks[one.rank == 2]) for one in waits.current.inspection.ranks))
    for moment in (112, 113):
        assert each.take_at(moment) == [state]
        each.reply(waits)
    assert each.take_at(114) == [(Detail.WAITS, False)]
    told = "ranks 0, 1, 3 wait in all_reduce #11 of default_pg; rank 2 has not entered it: load at data.py:3"
    assert told in " ".join(row.strip() for row in each.reply(whole, Detail.WAITS))
    for moment, detail in ((118, Detail.STATE), (119, Detail.WAITS), (142, Detail.WAITS), (143, Detail.STATE)):
        assert each.take_at(moment) == [(detail, False)]
        each.reply(whole, detail)
    each.take_at(144)
    assert "load at data.py:3" not in "".join(each.reply(free))
    assert each.take_at(145) == [(Detail.LATENESS, False), state]
    each.reply(free)
    each.take("z")
    assert each.take_at(150) == [(Detail.WAITS, True)], "a line of code and of output for each rank"
