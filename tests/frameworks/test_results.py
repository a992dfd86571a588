"""Tests that results are equal to the last digit with and without preloading."""

from pathlib import Path

import pytest

from tests.benchmarks import contenders
from tests.conftest import read_events
from tests.frameworks.launchers import PROGRAMS, TIMEOUT_S, Launchers, Report, reports, requires

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(2 * TIMEOUT_S)]


def compared(launchers: Launchers, program: Path, *imported_once: str) -> list[Report]:
    """What two ranks report under ddplaunch, nothing typed; plain processes that a loop has started report the same."""
    log = launchers.folder / "log"
    ours = reports(launchers.ddplaunch("--log-dir", log, program))
    assert ours == reports(launchers.python(PROGRAMS / "start_by_loop.py", "2", program))
    (ready,) = read_events(log, "ready")
    assert set(imported_once) <= set(ready["modules"]), ready
    return ours


@requires("accelerate", "transformers")
def test_accelerate(launchers):
    first, second = compared(launchers, PROGRAMS / "accelerate_loop.py", "accelerate", "transformers")
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["losses"] != second["losses"]  # each has batches of its own


@requires("datasets", "peft", "trl")
def test_trl_with_peft_and_datasets(launchers):
    """Each rank keeps its rows in a file of its own: where both had the same random name, one got the other's."""
    ours = compared(launchers, contenders.PROGRAMS / "trl_sft.py", "datasets", "peft", "trl")
    assert [(report["rank"], report["first"]) for report in ours] == [(0, "w0"), (1, "w24")]
    assert len(ours[0]["losses"]) == 3
