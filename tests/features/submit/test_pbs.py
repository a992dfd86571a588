"""Tests of PBS: the script of a job, and reading the output of its programs."""

import pytest
from msgspec.structs import replace

from ddplaunch.features.submit.pbs import Pbs, parse_qstat
from ddplaunch.system.schedulers.scheduler import JobId
from tests.features.submit.states import DELETED, HELD, OUT_OF_MEMORY
from tests.features.submit.test_scripts import SMALLEST


@pytest.mark.parametrize(("typed", "written"), [("200G", "200gb"), ("200GB", "200gb"), ("64000", "64000mb")])
def test_memory_in_the_units_of_pbs(typed, written):
    assert f":mem={written}\n" in Pbs().render_script(replace(SMALLEST, mem=typed))


SHOWN = """Job Id: 4711.pbs01
    Job_Name = train.py
    job_state = {state}
{more}    Variable_List = PBS_O_HOME=/home/me,PBS_O_LANG=C.UTF-8,
\tPBS_O_WORKDIR=/data/wine

"""


@pytest.mark.parametrize(
    ("state", "more", "expected"),
    [
        ("Q", "", "waits"),
        ("Q", "    comment = Not Running: Insufficient amount of resource: ngpus (R: 8 A: 4 T\n\t: 16)\n",
         "waits: Not Running: Insufficient amount of resource: ngpus (R: 8 A: 4 T: 16)"),
        ("H", "", HELD),
        ("R", "    comment = Job run at Mon Nov 23 at 10:00 on (n1:ncpus=8)\n", "is running"),
        ("S", "", "is suspended"),
        ("E", "    Exit_status = 7\n", "is ending"),
        ("F", "    Exit_status = 0\n", "completed (exit code 0)"),
        ("F", "    Exit_status = 7\n", "failed (exit code 7)"),
        ("F", "    Exit_status = 271\n", "was killed by signal 15 (exit code 143)"),
        ("F", "    Exit_status = -29\n", "reached its time limit (exit code 143)"),
        ("F", "    Exit_status = -27\n", OUT_OF_MEMORY),
        ("F", "    Exit_status = -1\n", "was not run by PBS (Exit_status -1) (exit code 1)"),
        ("F", "", DELETED),
    ],
)  # fmt: skip
def test_the_description_of_a_job(state, more, expected):
    (record,) = parse_qstat(SHOWN.format(state=state, more=more))
    assert record.description == expected
    assert (record.code is not None) == ("exit code" in expected)


def test_states_are_parsed_from_one_qstat():
    """One ``qstat -x -f -t`` gives the states of all jobs; of an array, those of each index."""
    shown = "".join(
        SHOWN.replace("4711.pbs01", name).format(state=state, more=more)
        for name, state, more in (
            ("4711.pbs01", "R", ""),
            ("4712[].pbs01", "B", ""),
            ("4712[0].pbs01", "X", "    Exit_status = 3\n"),
            ("4712[1].pbs01", "Q", ""),
        )
    )
    found = [(each.job, each.number, each.code, each.is_running) for each in parse_qstat(shown)]
    assert found == [
        (JobId("4711.pbs01"), "4711.pbs01", None, True),
        (JobId("4712.pbs01", index=""), "4712.pbs01", None, False),
        (JobId("4712.pbs01", index="0"), "4712_0.pbs01", 3, False),
        (JobId("4712.pbs01", index="1"), "4712_1.pbs01", None, False),
    ]


def test_an_answer_of_something_else():
    assert not list(parse_qstat("Hello\n"))
    assert [each.description for each in parse_qstat(SHOWN.format(state="Z", more=""))] == ["is in state Z"]
