"""Tests of reading a pod's log on after a break: without a gap, and no line twice."""

import io
import random
from contextlib import closing
from types import SimpleNamespace

import pytest

from ddplaunch.features.kubernetes import pod_logs
from ddplaunch.features.kubernetes.kubectl import Place
from ddplaunch.features.kubernetes.pod_logs import LineCursor, PodLogs, parse_moment
from ddplaunch.system.schedulers.scheduler import BatchJobState
from tests.conftest import wait_until
from tests.features.kubernetes.test_job_state import ended, pod, pods


def line(ns: int, text: str) -> bytes:
    return f"2026-11-29T12:00:{ns // 10**9:02}.{ns % 10**9:09}Z {text}\n".encode()


def reread(log: list[bytes], since: str | None) -> list[bytes]:
    """What the API server sends: from the whole second of a timestamp on."""
    return [each for each in log if since is None or each[:19] >= since[:19].encode()]


@pytest.mark.parametrize("seed", range(20))
def test_a_log_is_read_on_after_a_break(seed):
    """Many lines have the same moment; a break may come after any of them, also at once again."""
    chance = random.Random(seed)
    moment, log = 0, []
    for number in range(60):
        moment += chance.choice([0, 0, 1, 10**8, 10**9])
        log.append(line(moment, str(number)))
    cursor, found = LineCursor(), []
    while len(found) < len(log):
        cursor.reread()
        sent = reread(log, cursor.since)
        for each in sent[: chance.randint(0, len(sent))]:
            if new := cursor.accept(each):
                found.append(new.text)
    assert found == [f"{number}\n".encode() for number in range(60)]


@pytest.mark.parametrize(
    ("later", "how"),
    [
        pytest.param([pod()], {"follow": "true"}, id="it runs"),
        pytest.param([pod(restarts=1)], {"previous": "true"}, id="it was restarted"),
        pytest.param([ended(0)], {}, id="it has ended"),
        pytest.param([], {}, id="its pod was deleted"),
    ],
)
def test_a_stream_that_breaks_is_followed_on_only_while_its_container_runs(monkeypatch, later, how):
    asked = []

    def start_log(place, name, query):
        asked.append(query)
        return SimpleNamespace(stdout=io.BytesIO(), stderr=io.BytesIO(), wait=lambda: 0, kill=lambda: None)

    monkeypatch.setattr(pod_logs, "start_reading_log", start_log)
    seen = pods(pod())
    with closing(PodLogs(Place("", "default"), "wine", lambda: seen, 0)) as logs:
        logs.copy_new()
        wait_until(lambda: asked, "the first request")
        seen = pods(*later)
        wait_until(lambda: logs.update(BatchJobState("runs")) or len(asked) > 1, "the next request")
    always = {"container": "ddplaunch", "timestamps": "true"}
    assert asked[:2] == [{**always, "follow": "true"}, {**always, **how}]


def test_a_line_without_a_timestamp_is_kept():
    cursor = LineCursor()
    assert cursor.accept(line(5, "a")).text == b"a\n"
    assert cursor.accept(b"failed to open the log\n").text == b"failed to open the log\n"
    assert cursor.accept(line(4, "earlier")) is None


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("1970-01-01T00:00:00.000000001Z", 1),
        ("1970-01-01T02:00:00.000000001+02:00", 1),
        ("1969-12-31T22:30:00-01:30", 0),
        ("2026-11-29T12:00:00Z", 1_795_953_600_000_000_000),
        ("yesterday", None),
        ("", None),
    ],
)
def test_moments(text, moment):
    assert parse_moment(text) == moment
