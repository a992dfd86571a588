"""Tests of the state of a job array, from what its scheduler still knows and from what was saved."""

import time

import pytest

from ddplaunch.cli.lookup.job_arrays import summarize_array
from ddplaunch.core.feature_registry import load_features
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.schedulers.scheduler import ACCOUNTING_DELAY_S
from ddplaunch.system.schedulers.submitted_job import JobEnd, SubmittedJob


@pytest.mark.parametrize(
    ("gone_for", "summary", "code", "missing"),
    [
        (1.0, "1 completed, 1 ended", None, "has ended; exit status not known yet"),
        (ACCOUNTING_DELAY_S + 60.0, "1 completed, 1 failed", 1, "ended; exit status unknown"),
    ],
)
def test_an_index_that_the_scheduler_has_forgotten_counts_as_failed_after_a_while(
    state, gone_for, summary, code, missing
):
    """``wait`` returns 1 for it, as for a job that is not an array."""
    load_features()  # jobs of unknown schedulers are left out
    array = SubmittedJob(
        number="7", cluster=None, name="train.py", target="", nodes=1, array="0-1", cwd="", log="", run_id=None,
        python="", image=None, moment=0.0, gone=time.time() - gone_for, ends={"0": JobEnd("completed", 0)},
    )  # fmt: skip
    submitted_jobs.save_job(array)
    words, highest, states = summarize_array(array, [])
    assert (words, highest) == (summary, code)
    assert (states["1"].description, states["1"].code) == (missing, code)
    saved = submitted_jobs.find_job("7_1")
    assert saved
    assert (saved.code, saved.get_end("1")) == (code, JobEnd(missing, code) if code else None)
