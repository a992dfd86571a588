"""Trials of the frameworks themselves, as they are installed here."""

import dataclasses
import json
import subprocess
import sys

import pytest

from ddplaunch.preload import verdict
from ddplaunch.preload.question import Question, Statement
from tests.conftest import clean_environment
from tests.patience import patience
from tests.preload.installation import reasons

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]


def trial(folder, *statements):
    question = Question((Statement("torch"), *statements), seeds_first=False)
    (folder / "question.json").write_text(json.dumps(dataclasses.asdict(question)))
    command = [sys.executable, "-m", "ddplaunch.preload.trial", folder / "question.json", folder / "verdict.json"]
    ended = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=patience(240), check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = verdict.read(str(folder / "verdict.json"))
    assert found is not None
    assert found.holds(clean_environment())
    return found


def test_torchmetrics_is_imported_once_and_its_rank_repaired(tmp_path):
    pytest.importorskip("torchmetrics")
    found = trial(tmp_path, Statement("torchmetrics"))
    assert "torchmetrics" in found.modules
    assert "torchmetrics" in {each.name for each in found.distributions}


@pytest.mark.ci
def test_the_trainer_of_transformers_is_imported_once(tmp_path):
    pytest.importorskip("transformers")
    found = trial(tmp_path, Statement("transformers", ("Trainer", "AutoModelForSequenceClassification")))
    assert "transformers" in found.modules
    assert not reasons(found)
