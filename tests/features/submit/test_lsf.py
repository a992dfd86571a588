"""Tests of reading the output of LSF's programs."""

import pytest

from ddplaunch.features.submit.lsf import parse_bhist, parse_bjobs
from ddplaunch.system.schedulers.scheduler import JobId
from tests.features.submit.states import HELD, KILLED, OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("PEND|-|-", "waits"),
        ("PSUSP|-|-", HELD),
        ("RUN|-|-", "is running"),
        ("UNKWN|-|-", "runs on a host that does not answer"),
        ("NEW|-|-", "is in state NEW"),
        ("DONE|-|-", "completed (exit code 0)"),
        ("EXIT|7|-", "failed (exit code 7)"),
        ("EXIT|140|TERM_RUNLIMIT: job killed after reaching LSF run time limit",
         "reached its time limit (exit code 143)"),
        ("EXIT|137|TERM_MEMLIMIT: job killed after reaching LSF memory usage limit",
         OUT_OF_MEMORY),
        ("EXIT|130|TERM_OWNER: job killed by owner", "was killed: LSF reports TERM_OWNER (exit code 130)"),
        ("EXIT|-|TERM_OWNER: job killed by owner", KILLED),
    ],
)  # fmt: skip
def test_the_description_of_a_job(shown, expected):
    (record,) = parse_bjobs(f"4711|0|{shown}\n")
    assert record.description == expected
    assert (record.code is not None) == ("exit code" in expected)


def test_states_are_parsed_from_one_bjobs():
    """One bjobs gives the states of all jobs, also with the index after the number (LSB_BJOBS_DISPLAY_ENH)."""
    shown = "4711|0|RUN|-|-\n4712|1|DONE|-|-\n4712[2]|2|EXIT|7|-\n"
    assert [(each.job, each.number, each.code, each.is_running) for each in parse_bjobs(shown)] == [
        (JobId("4711"), "4711", None, True),
        (JobId("4712", index="1"), "4712_1", 0, False),
        (JobId("4712", index="2"), "4712_2", 7, False),
    ]


def test_an_answer_of_something_else():
    assert not list(parse_bjobs("LSF is down. Please wait ...\n"))


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
        ("Mon Nov 23 10:05:00: Done successfully. The CPU time used is 1.2 seconds;", "completed (exit code 0)"),
        ("Mon Nov 23 10:05:00: Exited with exit code 7. The CPU time used is 1.2 s\n                     econds;",
         "failed (exit code 7)"),
        (
            "Mon Nov 23 10:05:00: Exited with exit cod\n                     e 140. The CPU time used is 1.2 seconds;\n"
            "Mon Nov 23 10:05:00: Completed <exit>; TERM_RUNLIMIT: job killed after reaching\n"
            "                      LSF run time limit;",
            "reached its time limit (exit code 143)",
        ),
    ],
)  # fmt: skip
def test_the_end_of_a_job_in_bhist(end, found):
    assert [each.description for each in parse_bhist(HISTORY.format(end=end))] == ([found] if found else [])


def test_the_ends_of_several_jobs_in_bhist():
    done = HISTORY.format(end="Mon Nov 23 10:05:00: Done successfully. The CPU time used is 1.2 seconds;")
    runs = HISTORY.format(end="Mon Nov 23 10:05:00: Starting (Pid 31390);").replace("<4711>", "<4712>")
    found = parse_bhist(f"{done}{'-' * 78}\n{runs}{done.replace('<4711>', '<4713[2]>')}")
    assert [(each.number, each.code) for each in found] == [("4711", 0), ("4713_2", 0)]
