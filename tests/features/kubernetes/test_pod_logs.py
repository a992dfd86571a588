"""Tests of reading a pod's log on after a break: without a gap, and no line twice."""

import random

import pytest

from ddplaunch.features.kubernetes.pod_logs import LineCursor, parse_moment


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
