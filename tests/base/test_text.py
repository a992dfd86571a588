"""Tests of lists of names and near misses."""

import time

import pytest

from ddplaunch.base.text import closest_match, format_duration, format_ranks
from tests.scaled_timeouts import scaled_timeout


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 3], "ranks 0, 1, 3"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([8, *range(7)], "ranks 0 to 6 and 8"),
        ([0, 1, 2, 5, 7, 8, 9], "ranks 0 to 2, 5 and 7 to 9"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
        ([*range(20), *range(30, 60, 2)], "ranks 0 to 19, 30, 32, 34, 36, 38, 40, 42 and 8 more"),
        ([*range(0, 32, 2), *range(40, 60)], "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 28 more"),
    ],
)
def test_ranks_in_few_words(numbers, text):
    assert format_ranks(numbers) == text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-1, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (599, "9 min 59 s"),
        (725, "12 min"),
        (3600, "1 h"),
        (11550, "3 h 12 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_a_duration_in_a_sentence(seconds, expected):
    assert format_duration(seconds) == expected


def test_a_long_text_is_no_misspelling():
    began = time.process_time()
    assert closest_match("x" * 20_000, [f"--option-{number}" for number in range(100)]) is None
    assert time.process_time() - began < scaled_timeout(0.1)
