"""Verdicts in files, and how long they hold."""

import json
import os
from dataclasses import replace

import pytest

from ddplaunch.preload import verdict
from ddplaunch.preload.question import Question, Setting, Statement
from ddplaunch.preload.verdict import Distribution, Excluded, Folder, Verdict


@pytest.fixture
def found(tmp_path):
    record = tmp_path / "site" / "thing-1.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    record.write_text("thing.py,,\n")
    distribution = Distribution("thing", str(record), verdict.stamp(str(record)), verdict.digest_of_file(str(record)))
    return Verdict(
        modules=("torch", "thing"),
        excluded=(Excluded("other", "prints at import"),),
        distributions=(distribution,),
        names=frozenset({"torch", "thing"}),
        tried=frozenset({"late"}),
        folders=(Folder(str(tmp_path / "site"), os.stat(tmp_path / "site").st_mtime_ns),),
        variables=(("MODE", verdict.digest_of("MODE", "fast")), ("TOKEN", verdict.digest_of("TOKEN", None))),
    )


def test_a_verdict_is_read_as_it_was_written(tmp_path, found):
    path = str(tmp_path / "verdict.json")
    verdict.write(found, path)
    assert verdict.read(path) == found
    assert sorted(os.listdir(tmp_path)) == ["site", "verdict.json"]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"version": 1}', '{"version": 1, "modules": 3}', "\0", "{" * 99999]
)
def test_a_broken_file_is_none(tmp_path, text):
    (tmp_path / "verdict.json").write_text(text)
    assert verdict.read(str(tmp_path / "verdict.json")) is None


def test_a_verdict_of_another_version_is_none(tmp_path, found):
    path = tmp_path / "verdict.json"
    verdict.write(found, str(path))
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": verdict.VERSION + 1}))
    assert verdict.read(str(path)) is None


def test_it_holds_while_nothing_changes(found):
    assert found.holds({"MODE": "fast"})
    os.utime(found.distributions[0].record)  # copied, say
    assert found.holds({"MODE": "fast"})


def test_it_does_not_hold_for_another_version_of_a_distribution(found):
    with open(found.distributions[0].record, "a") as file:
        file.write("more.py,,\n")
    assert not found.holds({"MODE": "fast"})


def test_it_does_not_hold_without_a_distribution(found):
    os.remove(found.distributions[0].record)
    assert not found.holds({"MODE": "fast"})


def test_it_does_not_hold_once_something_else_is_installed(found):
    os.mkdir(os.path.join(found.folders[0].path, "another"))
    assert not found.holds({"MODE": "fast"})


@pytest.mark.parametrize("environ", [{}, {"MODE": "slow"}, {"MODE": "fast", "TOKEN": ""}])
def test_it_does_not_hold_where_a_variable_differs_that_was_read(found, environ):
    assert not found.holds(environ)


def test_a_verdict_does_not_tell_what_variables_say(tmp_path, found):
    verdict.write(
        replace(found, variables=(("TOKEN", verdict.digest_of("TOKEN", "hunter2")),)), str(tmp_path / "verdict.json")
    )
    assert "hunter2" not in (tmp_path / "verdict.json").read_text()


def test_each_question_has_a_file_of_its_own_whatever_came_late():
    question = Question((Statement("torch"), Statement("einops", ("rearrange",))))
    assert verdict.key(question, {}) == verdict.key(replace(question, late=("pandas",)), {})
    others = [
        replace(question, sets_unseen=True),
        replace(question, settings=(Setting("HF_HOME", None),)),
        replace(question, statements=question.statements[::-1]),
    ]
    assert len({verdict.key(each, {}) for each in (question, *others)}) == 4
    assert verdict.key(question, {}) != verdict.key(question, {"PYTHONPATH": "/somewhere"})


def test_it_holds_in_every_job_whatever_that_is_called(found):
    """A scheduler gives each job a number and often a folder of its own."""
    of_one = {"MODE": "fast", "TMPDIR": "/tmp/job.1", "SLURM_JOB_ID": "1"}
    of_another = {**of_one, "TMPDIR": "/tmp/job.2", "SLURM_JOB_ID": "2"}
    names = (("TMPDIR", verdict.digest_of("TMPDIR", "/tmp/job.1")), ("SLURM_JOB_ID", "set"))
    of_jobs = replace(found, variables=(*found.variables, *names))
    assert of_jobs.holds(of_one)
    assert of_jobs.holds(of_another)
    assert of_jobs.holds({"MODE": "fast", "SLURM_JOB_ID": "3"})
    for name in (
        "AWS_BATCH_JOB_ID",
        "DSTACK_RUN_NAME",
        "LEPTON_JOB_NAME",
        "MLP_TASK_ID",
        "VC_TASK_INDEX",
        "_CONDOR_PROCNO",
    ):
        assert verdict.digest_of(name, "1") == verdict.digest_of(name, "2") != verdict.digest_of(name, None)
    assert not of_jobs.holds({"MODE": "fast", "TMPDIR": "/tmp/job.1"})
