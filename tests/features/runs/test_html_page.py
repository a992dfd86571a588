"""Tests of the HTML report of a run: complete, safe with any input, and readable in a real browser.

``python -m tests.features.runs.test_html_page`` writes the golden pages anew, to be read in the diff.
"""

import os
import re
import time
from collections.abc import Callable
from datetime import datetime, timezone
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddplaunch import __version__
from ddplaunch.base.errors import host_name
from ddplaunch.cli import client
from ddplaunch.cli.lookup.run_index import FoundRun
from ddplaunch.cli.lookup.running_jobs import RunningJob
from ddplaunch.core.control_socket.job_status import JobState, RankState, RankStatus, Status
from ddplaunch.features.runs.html_report import charts, render_page
from ddplaunch.features.runs.html_report.output_section import MAX_BYTES
from ddplaunch.features.runs.html_report.page_inputs import with_live_state
from ddplaunch.features.runs.html_report.page_run import PageInputs, PageRun, time_of_day
from ddplaunch.features.runs.html_report.template import SCRIPT, SCRIPT_HASH, STYLE
from ddplaunch.features.runs.html_report.timeline import axis_ticks
from ddplaunch.features.runs.time_tracker import BreakdownReply, BreakdownRequest
from ddplaunch.observe.diagnosis.inspection import ProcessCondition
from ddplaunch.observe.history.run_record import RankRecord, RunRecord, RunState
from ddplaunch.observe.history.sample_file import SavedPlan
from ddplaunch.observe.history.time_breakdown import TimeBreakdown
from ddplaunch.observe.request import InspectJobRequest, JobInspection
from ddplaunch.observe.samples.sample import GpuSample, NodeSample, RankSample
from tests.browser import measure_page, needs_browser, open_page, search_page
from tests.core.output.sample_records import BEGAN, inspection, record

EVIL = "<script>console.log('ran')</script><img src=http://127.0.0.1:9/x onerror=console.log(1)>\"' onload='x"
"""What a user may call anything; as a part of the page it would be seen in the console, or in the network."""


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def count(self, tag: str, class_: str | None = None) -> int:
        return sum(name == tag and class_ in (None, attributes.get("class")) for name, attributes in self.found)


def evil(ranks: int = 4) -> RunRecord:
    """A run in which everything that can be named has a bad name."""
    base = record(ranks, target=EVIL, message=EVIL)
    (only,) = base.attempts
    rows = tuple(replace(each, host=EVIL) for each in only.ranks)
    seen = inspection(ranks, 2, BEGAN + 59, where=EVIL)
    thread = replace(seen.ranks[2].threads[0], name=EVIL)
    output = replace(seen.ranks[2], threads=(thread, thread), host=EVIL)
    quiet = replace(seen.ranks[3], threads=(), no_stack=EVIL)
    return replace(
        base,
        run=EVIL,
        run_id=EVIL,
        argv=(EVIL,),
        host=EVIL,
        cwd=EVIL,
        log_dir=EVIL,
        notes=(EVIL, "a\x1b[31mred\x00\u202eone"),
        attempts=(replace(only, ranks=rows, why=EVIL),),
        inspections=(replace(seen, ranks=(*seen.ranks[:2], output, quiet), silent=(EVIL,)),),
    )


def lived(ranks: int, attempts: int = 1, text: str = "step 1: loss 0.5\n") -> PageInputs:
    """Return the samples for ``record``: rank 1 is behind, and no rank makes progress in an attempt's last 25 s."""
    readings = [
        NodeSample(BEGAN + 62 * number + at, 5.0, number, tuple(one(rank, at) for rank in range(ranks)), (gpu(at),))
        for number in range(attempts)
        for at in range(5, 60, 5)
    ]
    facts = (("ranks per node", str(ranks), "--nproc"), ("master address", text, "one node"))
    plan = SavedPlan(facts, tuple((rank, "cuda:0", "0,1") for rank in range(ranks)), (("OMP_NUM_THREADS", text),))
    return PageInputs((readings,), {rank: text.encode() * 40 for rank in range(ranks)}, (2,), plan)


def one(rank: int, at: int) -> RankSample:
    rate = 12.5 if at <= 30 else 0.0
    return RankSample(rank, 0.9 + rank / 100, 2e9 + 1e7 * at, 1e6, 2e5, rate, float(rank == 1))


def gpu(at: int) -> GpuSample:
    return GpuSample(0, 0, 88.0, 7e10, 650.0, float(at > 30))


def failed_page() -> str:
    """Return the page of a run of three ranks on two nodes, of one of which there is no record."""
    run, hosts = record(3, 2), ("n0", "n0", "n1")
    moved = (
        replace(each, ranks=tuple(replace(rank, host=host) for rank, host in zip(each.ranks, hosts, strict=True)))
        for each in run.attempts
    )
    waits, absent, output = inspection(3, 1, BEGAN + 120).ranks
    thread = replace(absent.threads[0], name="loader")
    seen = (
        waits,
        replace(absent, threads=(thread, replace(thread, name=""), replace(thread)), host="n0"),
        replace(output, threads=(), no_stack="it did not respond", host="n1", condition=ProcessCondition.BLOCKED),
    )
    looked = replace(run.inspections[0], ranks=seen)
    kept = {"attempts": tuple(moved), "inspections": (looked,), "nnodes": 2, "log_dir": "/logs", "left_out": 4}
    known = replace(lived(3, 2), printed={0: b"step 1\nbar 1\rbar 2\r\n", 2: b"<b>"}, printed_in=0)
    return render_page([replace(run, stalls=((BEGAN + 30, BEGAN + 55),), **kept)], known)


def lost_page() -> str:
    """Return the page of a run of which not much is known."""
    run = record(3)
    one, other, _ = run.attempts[0].ranks
    ranks = (replace(one, ended=None, code=None), replace(other, code=0, host=""), RankRecord(2, "n0"))
    first = replace(run.attempts[0], ranks=ranks, ended=None, why="", verdict=None)
    begun = first, replace(first, number=1, ranks=(RankRecord(7, "", 9, BEGAN + 50, BEGAN + 60, -11, 2 << 30),))
    lost = {"attempts": begun, "verdict": None, "ended": None, "code": None, "fate": RunState.LOST, "signal": 15}
    steps = (5.0, 12.0, 30.0, 60.0)
    samples = [
        NodeSample(BEGAN + at, at - before, 0, (RankSample(0, 2.0, None, None, 3e4 * at, None, None),))
        for before, at in pairwise(steps)
    ]
    known = PageInputs((samples,), live=True, effective="goodput unknown: the run was lost")
    return render_page([replace(run, inspections=(), notes=(), **lost)], known)


GOLDEN = {Path(__file__).with_name(f"{make.__name__}.html"): make for make in (failed_page, lost_page)}


def golden_text(make: Callable[[], str]) -> str:
    """Return a page without style, script and the present, with a line for each section, row of a table and drawing."""
    charts.CHART_STEPS, charts.HOVER_STRIPES, charts.SPARKLINE_STEPS = 6, 2, 4
    text = make().replace(STYLE, "").replace(SCRIPT, "").replace(SCRIPT_HASH, "HASH").replace("\n", "&#10;")
    text = re.sub(r"20\d\d-\d\d-\d\d [\d:]+ [-+]\d\d:\d\d", "TIME", text.replace(__version__, "VERSION"))
    return re.sub("(?=<(?:section|tr|svg|details|footer))", "\n", text) + "\n"


@pytest.mark.parametrize("file", GOLDEN)
def test_pages_equal_the_golden_files(file, monkeypatch):
    for name in ("CHART_STEPS", "HOVER_STRIPES", "SPARKLINE_STEPS"):
        monkeypatch.setattr(charts, name, None)  # restores it at the end
    assert golden_text(GOLDEN[file]) == file.read_text()


@pytest.mark.parametrize(
    ("total", "labels"),
    [
        (1e-3, "0 s"),
        (0.05, "0 s, 0.01 s, 0.02 s, 0.03 s, 0.04 s, 0.05 s"),
        (300.0, "0 s, 1m00s, 2m00s, 3m00s, 4m00s, 5m00s"),
        (301.0, "0 s, 2m00s, 4m00s"),
        (216_000.0, "0 s, 12h00m, 1d00h, 1d12h, 2d00h, 2d12h"),
        (500_000.0, "0 s, 2d00h, 4d00h"),
    ],
)
def test_a_time_axis_has_at_most_six_labels(total, labels):
    assert ", ".join(tick.text for tick in axis_ticks(total)) == labels


def test_last_lines_of_an_earlier_attempt_say_so():
    """The history has no output of ranks that succeed."""
    earlier = replace(lived(4, 3), printed_in=1)
    assert "Last lines of the ranks, in attempt 1" in Elements(render_page([record(4, 3)], earlier)).text
    assert "in attempt" not in Elements(render_page([record(4, 3)], replace(earlier, printed_in=2))).text


def test_a_page_stays_below_a_megabyte():
    loud = lived(256, 3, "<" * 900 + "\n")
    assert len(render_page([record(256, 3)], loud).encode()) < 1_000_000
    assert MAX_BYTES < 500_000


def test_the_page_loads_nothing_from_elsewhere():
    text = render_page([record(4)])
    elements = Elements(text)
    assert not {"link", "img", "iframe", "object", "base", "form"} & {name for name, _ in elements.found}
    assert [text for text in re.findall("<script>(.*?)</script>", text, re.S)] == [SCRIPT]
    assert elements.count("script") == 1
    (rules,) = (each["content"] for _, each in elements.found if each.get("http-equiv"))
    assert rules == f"default-src 'none'; style-src 'unsafe-inline'; script-src '{SCRIPT_HASH}'"
    loads = {"src", "href", "srcset", "data", "action", "poster"}
    assert not any(loads & attributes.keys() for _, attributes in elements.found)
    assert "url(" not in render_page([record(4)])
    assert "@import" not in render_page([record(4)])


def test_no_name_becomes_markup():
    harmless, bad = Elements(render_page([record(4)], lived(4))), Elements(render_page([evil()], lived(4, text=EVIL)))
    assert bad.count("script") == 1
    assert {name for name, _ in bad.found} <= {name for name, _ in harmless.found} | {"p"}
    assert not any(key.startswith("on") for _, attributes in bad.found for key in attributes)
    assert bad.text.count(EVIL) >= 12
    assert r"a\x1b[31mred" not in bad.text
    assert r"ared\x00\u202eone" in bad.text


def test_a_rank_that_only_waited_is_not_shown_as_the_first_cause():
    whole = record(4)
    blamed = replace(whole.verdict, blame="rank 2 did not enter all_reduce #41", alike=(0, 1))
    attempt = replace(whole.attempts[0], verdict=blamed)
    ended = tuple(
        replace(each, condition=ProcessCondition.EXITED, code=1, groups=(), last=())
        for each in whole.inspections[0].ranks
    )
    seen = replace(whole.inspections[0], ranks=ended)
    run = replace(whole, attempts=(attempt,), verdict=blamed, inspections=(seen,))
    elements = Elements(render_page([run]))
    assert elements.count("rect", "failed") == 0
    assert elements.count("rect", "fell") == 3
    assert elements.text.count("rank 2 did not enter all_reduce #41") == 2, "in the report and of the attempt"
    assert "no rank waits" not in elements.text


def test_the_rank_that_a_time_limit_blames_is_shown_as_failed():
    """The signal by which ddplaunch ended it later is not the reason."""
    whole = record(4)
    first = replace(whole.verdict.first, exit_code=124, message="the job stalled")
    blamed = replace(whole.verdict, first=first, blame="no progress for 5m00s")
    rows = tuple(replace(each, code=-15) for each in whole.attempts[0].ranks)
    attempt = replace(whole.attempts[0], verdict=blamed, ranks=rows)
    text = render_page([replace(whole, attempts=(attempt,), verdict=blamed)])
    elements = Elements(text)
    assert (elements.count("rect", "failed"), elements.count("rect", "fell")) == (1, 0)
    assert "rank 2 on n0: was stopped (SIGTERM)" in elements.text
    assert "outside" not in elements.text


def test_of_a_run_that_ended_well_the_timeline_comes_first():
    well = replace(record(4), verdict=None, code=0, fate=RunState.DONE)
    for run, first in (well, "timeline"), (record(4), "failure"):
        ids = [attributes["id"] for name, attributes in Elements(render_page([run])).found if "id" in attributes]
        assert (ids[0], ids.index("timeline") < ids.index("stacks-0")) == (first, first == "timeline")


@pytest.mark.parametrize("fate", RunState)
def test_a_run_that_is_hardly_there(fate):
    bare = replace(
        record(2), attempts=(), inspections=(), verdict=None, notes=(), ended=None, code=None, fate=fate, world_size=0
    )
    text = Elements(render_page([bare])).text
    assert fate.value in text
    assert "Timeline" not in text
    assert "Failure" not in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{"ended": 70.0}], 70),
        ([{"ended": -5.0}], 0),  # the clock was set back
        ([{"ended": 70.0}, {"ended": None}, {"ended": 80.0}], 80),
        ([{}], 50),
        ([{"attempts": ()}], 40),
        ([{"attempts": (), "inspections": ()}, {"attempts": (), "inspections": ()}], 0),
        ([{"attempts": (), "inspections": (), "spent": TimeBreakdown(steady=30)}], 30),
        ([{"fate": RunState.RUNNING}], 100),
    ],
)
def test_the_page_ends_with_the_last_known_moment(monkeypatch, changes, expected):
    """Of a lost run, the last of: its begin, its time spent, its ranks' ends, its inspections."""
    monkeypatch.setattr(time, "time", lambda: BEGAN + 100)
    (attempt,) = record(1).attempts
    rank = replace(attempt.ranks[0], ended=BEGAN + 50)
    lost = replace(
        record(1),
        ended=None,
        fate=RunState.LOST,
        attempts=(replace(attempt, ranks=(rank,)),),
        inspections=(inspection(1, 0, BEGAN + 40),),
    )
    nodes = [replace(lost, **{**each, "ended": each.get("ended") and BEGAN + each["ended"]}) for each in changes]
    page = PageRun.from_records(nodes, PageInputs())
    assert (page.ended - BEGAN, page.total) == (expected, max(expected, 1e-3))


def test_an_attempt_that_goes_on(monkeypatch):
    """The page merges the history, the state from the launcher, and the usage from samples."""
    whole = record(2)
    (only,) = whole.attempts
    begun = tuple(RankRecord(each.rank, each.host, 70 + each.rank, BEGAN + 5) for each in only.ranks)
    attempts = (only, replace(only, number=1, ranks=begun, ended=None))
    kept = replace(whole, attempts=attempts, ended=None, code=None, verdict=None, fate=RunState.RUNNING)
    states = (RankStatus(0, 70, RankState.RUNNING), RankStatus(1, 71, RankState.EXITED, 3))
    now = Status("r", "t.py", whole.pid, 0, 2, BEGAN, BEGAN + 70, 1, JobState.RUNNING, states)
    replies = {
        InspectJobRequest: JobInspection(now, inspection(2, 1, BEGAN + 90)),
        BreakdownRequest: BreakdownReply(TimeBreakdown(), ((BEGAN + 5, BEGAN + 9),)),
    }
    monkeypatch.setattr(client, "send_request", lambda path, request, timeout: replies[type(request)])
    rows = tuple(one(rank, 15) for rank in (0, 1))
    known = PageInputs(([NodeSample(BEGAN + 77, 10.0, 1, rows)],))
    kept = replace(kept, host=host_name())
    of_another_host = replace(kept, node_rank=1, host="n1")
    found = FoundRun("r", RunningJob("door", "r", whole.pid), kept)
    seen, other = with_live_state(found, [kept, of_another_host], known)
    assert other == of_another_host
    assert (seen.attempts[0], len(seen.attempts), len(seen.inspections)) == (only, 2, 2)
    assert seen.stalls == ((BEGAN + 5, BEGAN + 9),)
    first, second = seen.attempts[1].ranks
    assert (first.pid, first.code, first.ended, first.peak_memory) == (70, None, None, 2_150_000_000)
    assert (second.pid, second.code, second.peak_memory) == (71, 3, 2_150_000_000)
    assert second.ended == pytest.approx(time.time(), abs=600)
    assert Elements(render_page([seen], known)).count("rect", "running") == 1


def test_nodes_are_put_together():
    whole, attempt = record(16), record(16).attempts[0]
    halves = [(replace(attempt, ranks=attempt.ranks[8 * node : 8 * node + 8]),) for node in (0, 1)]
    first, second = (replace(whole, node_rank=node, attempts=half) for node, half in enumerate(halves))
    both = Elements(render_page([first, second]))
    assert both.count("rect", "stopped") == 15
    assert "of 1 of 2 nodes" in Elements(render_page([first])).text
    assert "16 ranks on 2 nodes, " in both.text
    assert "the other records" not in both.text
    assert "8 ranks, " in Elements(render_page([record(8)])).text


def test_ranks_of_a_large_job_that_fared_alike_share_a_row():
    text = render_page([record(512, 3)])
    elements = Elements(text)
    assert elements.count("rect", "failed") == 3
    assert elements.count("rect", "stopped") == 6
    assert "3–511" in elements.text
    assert len(text) < 500_000


@pytest.mark.parametrize(("zone", "text"), [("XXX+5", "12:00:00 -05:00"), ("XXX-1", "18:00:00 +01:00")])
def test_times_have_the_offset_of_their_zone(zone, text, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert time_of_day(datetime(2026, 11, 22, 17, tzinfo=timezone.utc).timestamp()) == f"2026-11-22 {text}"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_impossible_times_are_shown_as_unknown():
    odd = replace(record(2), began=1e18, ended=-1e18)
    assert "at an unknown time" in render_page([odd])


@pytest.fixture
def written(tmp_path):
    def write(run: RunRecord, text: str = "step 1: loss 0.5\n") -> Path:
        path = tmp_path / "a page.html"
        path.write_text(render_page([run], lived(run.world_size, len(run.attempts), text)), encoding="utf-8")
        return path

    return write


@pytest.mark.ci
@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "width", "dark"),
    [
        pytest.param(record(4), 1280, False, id="4", marks=pytest.mark.ci),
        pytest.param(evil(), 400, True, id="evil"),
        pytest.param(record(512, 3), 400, False, id="512", marks=pytest.mark.ci),
    ],
)
def test_a_browser_opens_it(run, width, dark, written, tmp_path):
    """Screenshots are written to $DDPLAUNCH_TEST_PICTURES, if it is set."""
    file = written(run, EVIL if run.run == EVIL else "step 1: loss 0.5\n")
    seen = open_page(file, tmp_path, width=width, dark=dark)
    assert (seen.console, seen.requests) == ([], [])
    assert "Timeline" in seen.dom
    assert seen.picture.stat().st_size > 10_000
    if folder := os.environ.get("DDPLAUNCH_TEST_PICTURES"):
        seen.picture.rename(Path(folder) / f"{run.world_size}-{len(run.run)}-{seen.picture.name}")
    size = measure_page(file, tmp_path, width=width)
    assert size.wide == []
    assert size.width <= width
    assert size.height < 7000


@pytest.mark.ci
@needs_browser
@pytest.mark.slow
def test_the_page_searches_the_output(tmp_path):
    outputs = {0: b"step 1\nloss 0.5\n", 1: b"step 1\n<b>LOSS</b> is nan\n", 2: b"nothing\n"}
    path = tmp_path / "a page.html"
    path.write_text(render_page([record(4)], PageInputs(printed=outputs, failed_first=(2,))), encoding="utf-8")
    assert search_page(path, tmp_path, ["", "loss", "<b>", "zebra"]) == [
        ["rank 2|nothing", "rank 0|step 1\nloss 0.5", "rank 1|step 1\n<b>LOSS</b> is nan"],
        ["rank 0|loss 0.5", "rank 1|<b>LOSS</b> is nan"],
        ["rank 1|<b>LOSS</b> is nan"],
        [],
    ]


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"code": 130, "verdict": None}, 1),  # Ctrl-C while they wait for rank 1
        ({"blame": "rank 1 did not enter all_reduce #5"}, 1),
        ({}, 2),  # it has failed by itself
    ],
)
def test_the_lines_of_the_culprit_are_unfolded(fields, first):
    run = record(3)
    if blame := fields.pop("blame", None):
        fields["verdict"] = replace(run.verdict, blame=blame)
    run = replace(run, inspections=(inspection(3, 1, BEGAN + 59),), **fields)
    known = replace(lived(3), failed_first=(2,) if run.verdict else ())
    _, output = render_page([run], known).split('<section id="output">')
    assert re.findall(r'<details open=""><summary><b>rank (\d)', output) == [str(first)]


def test_a_stall_is_in_the_timeline():
    run = replace(record(3), stalls=((BEGAN + 10, BEGAN + 20), (BEGAN + 15, BEGAN + 40)))
    page = render_page([run], lived(3))
    (timeline,) = re.findall(r'<section id="timeline">.*?</section>', page, re.DOTALL)
    assert "<title>10s: no progress for 30s</title>" in timeline


if __name__ == "__main__":
    for each in GOLDEN:
        each.write_text(golden_text(GOLDEN[each]))
