"""Tests that the real kubectl reads a manifest and loses nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import partial
from typing import Any

import pytest
import yaml

from tests.conftest import clean_environment, write_program
from tests.features.manifest.test_kubernetes import JOBS, golden
from tests.scaled_timeouts import scaled_timeout


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory):
    """Run ``kubectl WORDS --local -f FILE`` on a Job; a kubectl that knows successPolicy, 1.31, is needed."""
    home = tmp_path_factory.mktemp("home")

    def run(*words: str) -> str:
        environment = clean_environment({"HOME": str(home), "KUBECONFIG": str(home / "none")})
        done = subprocess.run(
            ["kubectl", *words], env=environment, capture_output=True, text=True, timeout=scaled_timeout(60)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    if shutil.which("kubectl") is None:
        pytest.skip("NO KUBECTL HERE: not installed")
    version = json.loads(run("version", "--client", "-o", "json"))["clientVersion"]["gitVersion"]
    numbers = re.match(r"v(\d+)\.(\d+)", version)
    if not numbers or tuple(map(int, numbers.groups())) < (1, 31):
        pytest.skip(f"NO KUBECTL HERE: {version} is too old")

    def local(job: dict[str, Any], *words: str) -> dict[str, Any]:
        file = write_program(home, "job.json", json.dumps(job))
        return dict(yaml.safe_load(run(*words, "--local", "-f", str(file), "-o", "yaml")))

    return local


def the_job(text: str) -> dict[str, Any]:
    """The Job of a manifest, alone or in a JobSet."""
    job = list(yaml.safe_load_all(text))[-1]
    if job["kind"] == "JobSet":
        (replicated,) = job["spec"]["replicatedJobs"]
        return {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    return dict(job)


def canonical(value: Any) -> Any:
    """Without nothing, which kubectl adds or leaves out; lists in the order of their names, quantities as strings."""
    if isinstance(value, dict):
        inner = {name: canonical(each) for name, each in value.items()}
        return {name: each for name, each in inner.items() if each not in (None, {}, "")}
    if isinstance(value, list):
        inner = [canonical(each) for each in value]
        return (
            sorted(inner, key=partial(json.dumps, sort_keys=True))
            if any(isinstance(each, dict) for each in inner)
            else inner
        )
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize("name", [name for name in JOBS if name not in ("trainjob", "pytorchjob")])
def test_kubectl_loses_no_field(kubectl, name):
    """To change an image it reads all into Kubernetes' own types, where what it does not know is lost."""
    job = the_job(golden(name))
    theirs = kubectl(job, "set", "image", "ddplaunch=other:1")
    job["spec"]["template"]["spec"]["containers"][0]["image"] = "other:1"
    assert canonical(theirs) == canonical(job)
