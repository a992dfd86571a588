"""Tests of what is shown of programs beside the ranks: while they are awaited, while they run, and after the end."""

import json
import re
import sys

import pytest

from tests.conftest import PROGRAMS, read_events, wait_until
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.start_modes import EXEC

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("state")]

SERVER = (sys.executable, PROGRAMS / "server.py", "{port}")
CLIENT = PROGRAMS / "client.py"


@pytest.fixture
def shown(run_ddplaunch):
    """Run a command, which must succeed, and return what it prints."""

    def run(*words):
        done = run_ddplaunch(*words)
        assert done.returncode == 0, done
        return done.stdout

    return run


@pytest.mark.ci
def test_views_of_programs(start_ddplaunch, shown, run_ddplaunch, tmp_path):
    server = ("--command", "--name", "vllm", "--ready", "file:ready", *SERVER, ":")
    tb = ("--command", "--name", "tb", "--kind", "sidecar", "sh", "-c", "echo no events; exit 4", ":")
    options = ("--nproc", "2", "--run-id", "views", "--metrics", "job.prom", *EXEC)
    job = start_ddplaunch("run", *server, *tb, *options, CLIENT, "http://{vllm}/x")
    wait_until(lambda: "the job continues" in job.stderr(), "the end of the sidecar")
    rows = [re.sub(r" {2,}", "  ", row) for row in shown("ps").splitlines()]
    assert re.search(r"vllm  starting  \S+  -  -  \d+  127.0.0.1:\d+", rows[2])
    assert re.search(r"tb  ended \(.*4.*\)  \S+  -  -  -  sidecar", rows[3])
    wait_until(lambda: "listening" in job.stderr(), "the server")
    (tmp_path / "ready").touch()
    job.wait_for("got ok", 2)
    assert re.search(r"vllm +ready +\S+ +- +- +\d+ +127.0.0.1:\d+", shown("ps"))
    (entry,) = [each for each in json.loads(shown("ps", "--json")) if each["run"] == "views"]
    assert [(each["program"], each["state"], each["code"]) for each in entry["programs"]] == [
        ("vllm", "ready", None),
        ("tb", "ended", 4),
    ]
    assert shown("logs", "views", "--program", "tb") == "no events\n"
    assert shown("logs", "views", "--program", "vllm", "--tail", "1") == "listening\n"
    refused = run_ddplaunch("logs", "views", "--program", "vlm")
    assert refused.returncode == 2
    assert "did you mean vllm?" in refused.stderr
    text = shown("stacks", "views")
    assert re.search(
        r"^vllm: ready for \S+, \d+ % CPU(, silent for \S+)? \(pid \d+, 127.0.0.1:\d+\)\n  last line: listening$",
        text,
        re.MULTILINE,
    )
    assert re.search(r"^tb: ended for \S+, exited with code 4$", text, re.MULTILINE)
    (tmp_path / "go").touch()
    assert job.wait() == 0
    report = shown("report", "views")
    assert re.search(r"vllm +service +\S+ +1 +\S+ MiB +\S+ +the job +127.0.0.1:\d+", report)
    assert re.search(r"tb +sidecar +\S+ +1 +\S+ MiB +\S+ +.*4", report)
    shown("report", "views", "--html", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h2>Programs</h2>" in page or ">Programs<" in page
    assert "<td>vllm</td>" in page
    assert re.search(r"<td>vllm</td><td>service</td>(<td>[^<]*</td>){2}<td>\S+ MiB</td><td>\S+</td>", page)
    programs = json.loads(shown("report", "views", "--json"))["programs"]
    assert [each["program"] for each in programs] == ["vllm", "tb"]


@pytest.mark.ci
def test_the_output_of_a_program_is_followed(start_ddplaunch, tmp_path):
    server = ("--command", "--name", "vllm", *SERVER, ":")
    job = start_ddplaunch("run", *server, "--nproc", "1", "--run-id", "f", *EXEC, CLIENT, "http://{vllm}/x")
    job.wait_for("got ok")
    following = start_ddplaunch("logs", "-f", "f", "--program", "vllm", "--tail", "1")
    following.wait_for("listening")
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert following.wait() == 0
    assert following.stdout() == "listening\n"


@pytest.mark.ci
def test_the_log_folder_has_the_output_of_all_starts(start_ddplaunch, shown, tmp_path):
    server = ("--command", "--name", "vllm", *SERVER, ":")
    options = ("--nproc", "1", "--run-id", "kept", "--log-dir", "logs", *EXEC)
    job = start_ddplaunch("run", *server, *options, CLIENT, "http://{vllm}/x", "once")
    assert job.wait() == 0
    assert shown("logs", "kept", "--program", "vllm").endswith("listening\nasked to end\n")
    assert shown("logs", "kept", "--program", "vllm", "--tail", "1") == "asked to end\n"
    planned, ready = read_events(tmp_path / "logs", "program_planned", "program_ready")
    assert (planned["program"], planned["kind"], planned["gpus"]) == ("vllm", "service", "")
    assert ready["seconds"] > 0


@pytest.mark.ci
def test_metrics_have_a_series_for_each_program(start_ddplaunch, tmp_path):
    options = ("--nproc", "1", "--metrics", "job.prom", *EXEC)
    job = start_ddplaunch("run", "--command", "--name", "vllm", *SERVER, ":", *options, CLIENT, "http://{vllm}/x")
    job.wait_for("got ok")
    path = tmp_path / "job.prom"
    wait_until(lambda: path.exists() and 'program="vllm"' in path.read_text(), "the file")
    assert re.search(r'ddplaunch_program_ready\{.*,program="vllm"\} 1\n', path.read_text())
    wait_until(lambda: "program_memory_bytes" in path.read_text(), "the first sample")
    for name in ("cpu_seconds_total", "memory_bytes", "silent_seconds"):
        assert re.search(rf'ddplaunch_program_{name}\{{.*,program="vllm"\}} [\d.]+\n', path.read_text())
    (tmp_path / "go").touch()
    assert job.wait() == 0
    assert "program_ready" not in path.read_text()


@pytest.mark.ci
def test_the_gpus_of_a_program(start_ddplaunch, run_ddplaunch, fake_nvml, tmp_path):
    gpus = fake_nvml.environ(4)
    server = ("--command", "--name", "vllm", "--gpus-per-node", "2", *SERVER, ":")
    options = ("--nproc", "2", "--run-id", "gpus", *EXEC)
    job = start_ddplaunch("run", *server, *options, CLIENT, "http://{vllm}/x", env=gpus)
    job.wait_for("got ok", 2)
    text = run_ddplaunch("stacks", "gpus", env=gpus).stdout
    (line,) = (each for each in text.splitlines() if each.startswith("vllm: "))
    assert re.search(r"% CPU, its GPUs (idle|\d+ % busy).* \(pid \d+, GPUs 0-1, ", line)
    (tmp_path / "go").touch()
    assert job.wait() == 0
