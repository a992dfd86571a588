"""The options ``--wait`` and ``--jobs`` of ``ddplaunch run``."""

# Without ``from __future__ import annotations``: the annotations are read when the module is imported.

from typing import Annotated

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import Option, OptionGroup, Options
from ddplaunch.core.option_values import AUTO, time_limit
from ddplaunch.core.options import RanksPerNode, wants_free_gpus

MAX_JOBS = 10_000

# With two or three lines for an option, a group can be seen at once.
# fmt: off


def _parse_jobs(option: Option, text: str | None) -> str | None:
    if text is None or text == AUTO or (text.isascii() and text.isdecimal() and 0 < int(text) <= MAX_JOBS):
        return text
    raise UsageError(f"{option.opts[-1]} {text}: expected a number of runs, 1 or more, or auto", "--jobs 4")


class Reservations(OptionGroup, frozen=True):
    """What this machine must have free before the job starts."""

    heading = "Ranks and devices"
    after = "gpus"

    wait: Annotated[float | None, Option("--wait TIME",
        "Wait at most this long for --gpus free:N or --jobs, in order of arrival.", time_limit)] = None
    jobs: Annotated[str | None, Option("--jobs N",
        "Start only while fewer than N of your runs with this option are in progress here; auto: only with a free CPU "
        "for each rank.", _parse_jobs)] = None

    def check_contradictions(self, options: Options) -> None:
        if self.wait is not None and not self.jobs and not wants_free_gpus(options[RanksPerNode].gpus):
            raise UsageError("--wait has nothing to wait for", "--gpus free:2, or --jobs 4")
