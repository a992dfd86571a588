"""LSF alone: what its programs print."""

from __future__ import annotations

import pytest

from ddplaunch.submit.lsf_batch import end_of, parse


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("PEND|-|-", "waits"),
        ("PSUSP|-|-", "waits, and is on hold"),
        ("RUN|-|-", "is running"),
        ("UNKWN|-|-", "runs on a host that does not answer"),
        ("NEW|-|-", "is in state NEW"),
        ("DONE|-|-", "completed (exit code 0)"),
        ("EXIT|7|-", "failed (exit code 7)"),
        (
            "EXIT|140|TERM_RUNLIMIT: job killed after reaching LSF run time limit",
            "reached its time limit (exit code 143)",
        ),
        (
            "EXIT|137|TERM_MEMLIMIT: job killed after reaching LSF memory usage limit",
            "used more memory than it had (exit code 137)",
        ),
        ("EXIT|130|TERM_OWNER: job killed by owner", "was killed: LSF says TERM_OWNER (exit code 130)"),
        ("EXIT|-|TERM_OWNER: job killed by owner", "was killed before it began (exit code 143)"),
    ],
)
def test_what_is_said_of_a_job(shown, said):
    record = parse(f"{shown}\n", "/data/wine/lsf-4711.out")
    assert record is not None
    assert record.words == said
    assert (record.code is not None) == ("exit code" in said)


def test_an_answer_of_something_else():
    assert parse("LSF is down. Please wait ...\n", "log") is None


HISTORY = """
Job <4711>, User <me>, Project <default>, Command <#!/bin/bash;# Written by ddp
                     launch submit>
Mon Nov 23 10:00:00: Submitted from host <login1>, to Queue <normal>, CWD </data/wine>;
{end}
"""


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("Mon Nov 23 10:05:00: Starting (Pid 31390);", None),
        ("Mon Nov 23 10:05:00: Done successfully. The CPU time used is 1.2 seconds;", (0, "completed")),
        (
            "Mon Nov 23 10:05:00: Exited with exit code 7. The CPU time used is 1.2 s\n                     econds;",
            (7, "failed"),
        ),
        (
            "Mon Nov 23 10:05:00: Exited with exit cod\n                     e 140. The CPU time used is 1.2 seconds;\n"
            "Mon Nov 23 10:05:00: Completed <exit>; TERM_RUNLIMIT: job killed after reaching\n"
            "                      LSF run time limit;",
            (143, "reached its time limit"),
        ),
    ],
)
def test_what_bhist_knows_of_a_job(end, found):
    assert end_of(HISTORY.format(end=end)) == found
