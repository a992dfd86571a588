"""Small words."""

import pytest

from ddplaunch.words import ranks


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
    assert ranks(numbers) == text
