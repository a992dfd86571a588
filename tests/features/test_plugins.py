"""Tests of plug-ins: the one of docs/plugins.md as an installed distribution, the first feature as one, broken ones."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

import ddplaunch
from tests.conftest import clean_environment, ddplaunch_command, run_command, write_program
from tests.features.test_new_feature import read_files
from tests.start_modes import FORKED, LIGHT

PAGE = Path(ddplaunch.__file__).parents[1] / "docs" / "plugins.md"

QUEUE = {
    # Each job runs in the background; its state is in a file of its number.
    "q-submit": """
        cat > $QUEUE/script
        log=$(sed -n 's/^#Q log //p' $QUEUE/script)
        echo running > $QUEUE/17
        (bash $QUEUE/script > "${log/\\%j/17}" 2>&1; echo ended $? > $QUEUE/17.new; mv $QUEUE/17.new $QUEUE/17) \\
            > /dev/null 2>&1 &
        echo 17
        """,
    "q-state": "cat $QUEUE/$1\n",
    "q-cancel": "echo cancelled $1\n",
}


def install(folder: Path, name: str, entry: str, **files: str) -> dict[str, str]:
    """Install a distribution with an entry point and these modules in a folder; return variables for a command."""
    site = folder / "site"
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    write_program(info, "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    write_program(info, "entry_points.txt", f"[ddplaunch.features]\n{entry}\n")
    for path, text in files.items():
        write_program(site, path, text)
    return {"PYTHONPATH": str(site), "XDG_STATE_HOME": str(folder / "state")}


@pytest.mark.ci
def test_the_scheduler_of_the_page_works(tmp_path: Path):
    files = dict(re.findall(r"```python\n# (siteq/\w+\.py): [^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL))
    assert {*files} == {"siteq/feature.py", "siteq/scheduler.py"}
    variables = install(tmp_path, "ddplaunch-siteq", "siteq = siteq.feature:FEATURE", **files)
    (tmp_path / "queue").mkdir()
    for name, text in QUEUE.items():
        write_program(tmp_path, f"bin/{name}", f"#!/bin/bash\n{text}").chmod(0o755)
    variables |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "QUEUE": str(tmp_path / "queue")}
    write_program(tmp_path, "train.py", "import sys\nprint('trained')\nsys.exit(3)\n")

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return run_command(ddplaunch_command(*words), tmp_path, variables)

    submitted = run("submit", "--scheduler", "siteq", "--nproc", "2", *LIGHT, "train.py")
    assert submitted.stdout.startswith("job 17: train.py on 1 node\n"), submitted
    ended = run("wait", "17")
    assert ended.returncode == 3, ended
    shown = run("logs", "17")
    assert "trained" in shown.stdout, shown
    listed = run("ps", "--all")
    assert re.search(r"17 +.*train.py", listed.stdout), listed
    unknown = run("submit", "--scheduler", "other", "train.py")
    assert "Site Queue (siteq)" in unknown.stderr


@pytest.mark.slow
def test_an_option_a_command_a_node_side_and_a_rank_side(tmp_path: Path):
    """The first feature of CONTRIBUTING.md, outside of the package."""
    files = {f"counting/{name}.py": text for name, text in read_files().items()}
    files = {name: text.replace("ddplaunch.features.count", "counting") for name, text in files.items()}
    (place,) = (name for name, text in files.items() if '"features/count/rank/greeting"' in text)
    files[place] = files[place].replace('"features/count/rank/greeting"', f'"{tmp_path}/site/counting/rank/greeting"')
    variables = install(tmp_path, "ddplaunch-counting", "count = counting.feature:FEATURE", **files)
    write_program(tmp_path, "train.py", "import time\ntime.sleep(600)\n")
    helped = run_command(ddplaunch_command("run", "--help-all"), tmp_path, variables)
    assert "--count" in helped.stdout
    words = ddplaunch_command("run", "--count", "--run-id", "plugged", "--nproc", "2", *FORKED, "train.py")
    with subprocess.Popen(
        words,
        env=clean_environment(variables),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout
        lines = [job.stdout.readline() for _ in range(2)]
        assert sorted(lines) == [f"[{rank}] hello from rank {rank}\n" for rank in range(2)]
        try:
            assert run_command(ddplaunch_command("count", "plugged"), tmp_path, variables).stdout == "2\n"
        finally:
            job.send_signal(signal.SIGTERM)
        assert "ddplaunch: 2 ranks have started\n" in job.communicate()[1]


BASE = "from ddplaunch.core.feature import Command, Feature, SchedulerEntry\n"

BROKEN = {
    "import no_such_module\n": "ModuleNotFoundError: No module named 'no_such_module'",
    "raise SystemExit(3)\n": "SystemExit: 3",
    "FEATURE = 7\n": "TypeError: plugin:FEATURE is not a Feature",
    f"{BASE}class F(Feature):\n    requires = ('gone',)\nFEATURE = F()\n": "LookupError: it requires the feature gone",
    f"{BASE}class F(Feature):\n    commands = (Command('ps', ''),)\nFEATURE = F()\n": (
        "ValueError: there is a command ps"
    ),
    f"{BASE}class F(Feature):\n    schedulers = (SchedulerEntry('slurm', '', '', ''),)\nFEATURE = F()\n": (
        "ValueError: there is a scheduler slurm"
    ),
    f"{BASE}from typing import Annotated\nfrom ddplaunch.base.options import Option, OptionGroup\n"
    "class G(OptionGroup, frozen=True):\n    more: Annotated[int, Option('--nproc N')] = 0\n"
    "class F(Feature):\n    options = (G,)\nFEATURE = F()\n": "ValueError: there is an option --nproc",
}


@pytest.mark.parametrize("text", BROKEN)
def test_one_that_cannot_be_used_is_named_and_the_job_goes_on(text, tmp_path):
    variables = install(tmp_path, "ddplaunch-broken", "broken = plugin", **{"plugin.py": text})
    write_program(tmp_path, "train.py", "print('trained')\n")
    words = ddplaunch_command("run", "--nproc", "1", *LIGHT, "train.py")
    done = run_command(words, tmp_path, variables)
    left_out = f"the plug-in broken (ddplaunch-broken 1.0) is left out: {BROKEN[text]}"
    assert (done.returncode, done.stdout) == (0, "trained\n"), done
    assert done.stderr == f"ddplaunch: {left_out}\n"


@pytest.mark.parametrize("hook", ["configure_job", "check", "make_screen", "run_instead", "make_zygote_source"])
def test_one_that_raises_later_is_named_and_the_job_goes_on(hook, tmp_path):
    how = "yield" if hook == "check" else "return"
    text = f"{BASE}class F(Feature):\n    def {hook}(self, *words):\n        {how} 1 / 0\nFEATURE = F()\n"
    variables = install(tmp_path, "ddplaunch-broken", "broken = plugin", **{"plugin.py": text})
    write_program(tmp_path, "train.py", "print('trained')\n")
    done = run_command(ddplaunch_command("run", "--nproc", "2", *LIGHT, "train.py"), tmp_path, variables)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] trained", "[1] trained"]), done
    why = "ZeroDivisionError: division by zero"
    assert done.stderr == f"ddplaunch: the plug-in broken (ddplaunch-broken 1.0) is left out: {why}\n"


def test_a_request_that_cannot_be_imported_leaves_the_others(start_ddplaunch, run_in_fork, tmp_path):
    text = f"{BASE}class F(Feature):\n    requests = ('no_such_module',)\nFEATURE = F()\n"
    variables = install(tmp_path, "ddplaunch-broken", "broken = plugin", **{"plugin.py": text})
    write_program(tmp_path, "train.py", "print('up', flush=True)\nimport time\ntime.sleep(600)\n")
    job = start_ddplaunch("run", "--nproc", "1", *LIGHT, "train.py", env=variables)
    job.wait_for("up")
    stopped = run_in_fork("stop", str(job.process.pid), env={"XDG_STATE_HOME": variables["XDG_STATE_HOME"]})
    assert stopped.returncode == 0, stopped
    assert job.wait() == 130
    assert "is left out: ModuleNotFoundError: No module named 'no_such_module'" in job.stderr()


def test_left_out_plugins_are_said_in_json_and_once(tmp_path):
    variables = install(tmp_path, "ddplaunch-broken", "broken = no_such_module", **{})
    write_program(tmp_path, "train.py", "")
    planned = run_command(ddplaunch_command("run", "--log-json", "--dry-run", "train.py"), tmp_path, variables)
    assert [json.loads(line)["text"].partition(":")[0] for line in planned.stderr.splitlines()] == [
        "the plug-in broken (ddplaunch-broken 1.0) is left out"
    ]
    listed = run_command(ddplaunch_command("ps"), tmp_path, variables)
    assert listed.stderr.count("is left out") == 1, listed
    completed = {**variables, "_DDPLAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "ddplaunch p", "COMP_CWORD": "1"}
    assert run_command(ddplaunch_command(), tmp_path, completed).stderr == ""


def test_a_dry_run_lists_them_and_a_variable_leaves_them_out(tmp_path):
    plugin = f"{BASE}FEATURE = Feature()\n"
    variables = install(tmp_path, "ddplaunch-empty", "empty = plugin", **{"plugin.py": plugin})
    write_program(tmp_path, "train.py", "")
    words = ddplaunch_command("run", "--dry-run", "train.py")
    note = "note: plug-ins: empty (ddplaunch-empty 1.0) (DDPLAUNCH_PLUGINS=0 to ignore)"
    assert note in run_command(words, tmp_path, variables).stdout
    assert "plug-in" not in run_command(words, tmp_path, {**variables, "DDPLAUNCH_PLUGINS": "0"}).stdout
