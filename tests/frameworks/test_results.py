"""Tests that results are equal to the last digit with and without preloading."""

import pytest

from tests.conftest import read_events
from tests.frameworks.launchers import PROGRAMS, TIMEOUT_S, reports, requires
from tests.tools.benchmarks.harness import PROGRAMS as BENCHMARKS

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(2 * TIMEOUT_S)]


@requires("datasets", "peft", "trl")
def test_trl_with_peft_and_datasets(launchers):
    """Nothing is typed; plain processes that a loop has started report the same.

    Each rank keeps its rows in a file of its own: where both had the same random name, one got the other's.
    """
    log, program = launchers.folder / "log", BENCHMARKS / "trl_sft.py"
    ours = reports(launchers.ddplaunch("--log-dir", log, program))
    assert ours == reports(launchers.python(PROGRAMS / "start_by_loop.py", "2", program))
    (ready,) = read_events(log, "zygote_ready")
    assert {"datasets", "peft", "transformers", "trl"} <= set(ready["modules"]), ready
    assert [(report["rank"], report["first"]) for report in ours] == [(0, "w0"), (1, "w24")]
    assert len(ours[0]["losses"]) == 3
