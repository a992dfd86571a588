"""Reads from a rank's output how many steps a second it took, where the program prints that. Pure."""

from __future__ import annotations

import math
import re

_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_SUMMARY = re.compile(  # the last line of transformers' Trainer
    rf"\btrain_steps_per_second['\"]?\s*[:=]\s*['\"]?{_NUMBER}", re.ASCII
)
_RATE = re.compile(
    rf"(?<![\w.]){_NUMBER}\s?(?:it|steps?|batch(?:es)?|iterations?)/s(?:ec)?\b"  # tqdm, Lightning
    rf"|(?<![\w.]){_NUMBER}\s?s/(?:it|step|batch|iteration)\b"  # tqdm, if a step takes longer than a second
    rf"|: \d+(?:/\d+)?, {_NUMBER}/s\b",  # ddplaunch.runtime.progress
    re.ASCII,
)


def find_step_rate(text: str) -> float | None:
    """Return the last number of steps a second in the end of a rank's output; None if there is none.

    A summary of the whole training is preferred: the last progress bar may be that of an evaluation.
    """
    if summaries := _SUMMARY.findall(text):
        return float(summaries[-1])
    *_, last = (None, *_RATE.finditer(text))
    if last is None:
        return None
    a_second, seconds, progress = last.groups()
    if seconds and not float(seconds):
        return None
    rate = 1 / float(seconds) if seconds else float(a_second or progress)
    return rate if math.isfinite(rate) else None
