"""Tests of help, version, and completion by a shell."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from ddplaunch import __version__
from ddplaunch.cli.click_commands import COMMANDS
from ddplaunch.cli.run_command import run
from ddplaunch.features.manifest.command import manifest
from ddplaunch.features.submit.command import submit
from tests.conftest import assert_refused, clean_environment, ddplaunch_command, run_command, write_program
from tests.observe.history.test_history import keep


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_ddplaunch_without_a_command_shows_help(run_in_fork, words):
    done = run_in_fork(*words)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: ddplaunch [OPTIONS] ")
    assert re.search(r"^  run +Run a training job", done.stdout, re.MULTILINE)
    assert re.search(r"^  submit +Submit a training job to Slurm", done.stdout, re.MULTILINE)
    assert re.search(r"^  devices +List", done.stdout, re.MULTILINE)
    assert re.findall(r"(?m)^(\w+):$", done.stdout) == [
        *("Options", "Run", "Watch", "Diagnose", "Clusters", "Housekeeping"),
    ]


def test_version(run_in_fork):
    for option in ("--version", "-V"):
        assert run_in_fork(option).stdout == f"ddplaunch {__version__}\n"


def test_version_for_a_reader_that_has_ended():
    reader, writer = os.pipe()
    os.close(reader)
    environment = clean_environment({"PYTHONUNBUFFERED": "1"})
    command = ddplaunch_command("--version")
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_of_a_command_and_pages(run_in_fork):
    assert run_in_fork("help", "logs").stdout == run_in_fork("logs", "--help").stdout
    assert run_in_fork("help", "run").stdout == run_in_fork("run", "--help").stdout
    assert run_in_fork("help", "torchrun").stdout.startswith("# ")
    listed = run_in_fork("help").stdout
    assert "\nHousekeeping:\n" in listed
    assert "hangs" in listed.partition("\nPages:\n")[2].split()
    for page in re.findall(r"help ([a-z]+)`", run_in_fork("--help").stdout + run_in_fork("run", "--help").stdout):
        assert run_in_fork("help", page).returncode == 0
    assert run_in_fork("help", "pbs").stdout.startswith("# Grid Engine, PBS, LSF")
    assert run_in_fork("help", "effective").stdout == run_in_fork("help", "goodput").stdout
    done = run_in_fork("help", "tochrun")
    assert (done.returncode, done.stderr.splitlines()[1:]) == (2, ["  did you mean ddplaunch help torchrun?"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("status",), "did you mean ddplaunch ps?"),
        (("list",), "did you mean ddplaunch ps?"),
        (("kill", "x"), "did you mean ddplaunch stop?"),
        (("rm", "x"), "did you mean ddplaunch clean?"),
        (("version",), "did you mean ddplaunch --version?"),
        (("stcaks",), "did you mean ddplaunch stacks?"),
        (("frobnicate",), "commands: run, "),
        (("--versoin",), "did you mean --version?"),
        (("run", "--version"), "ddplaunch --version shows it"),
        (("run", "--versoin", "x.py"), "ddplaunch run --help-all lists all options"),
        (("run", "--verbose", "x.py"), "--dry-run shows the plan"),
        (("run", "--log", "x.py"), "did you mean --log-dir?"),
        (("logs", "--tial", "3"), "did you mean --tail?"),
        (("logs", "--quiet"), "ddplaunch logs --help shows more"),
    ],
)
def test_suggestions_for_unknown_words(run_in_fork, words, hint):
    done = run_in_fork(*words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[1].strip().startswith(hint)


def test_installed_command_is_the_module():
    script = shutil.which("ddplaunch", path=str(sys.executable.rpartition("/")[0]))
    if script is None:
        pytest.skip("no command ddplaunch beside this interpreter: pip install -e .")
    for words in (["--version"], ["run", "no.py"]):
        runs = [
            subprocess.run([*how, *words], capture_output=True, text=True, env=clean_environment(), check=False)
            for how in ([script], ddplaunch_command())
        ]
        assert runs[0].stdout == runs[1].stdout
        assert runs[0].stderr == runs[1].stderr
        assert runs[0].returncode == runs[1].returncode


@pytest.mark.parametrize("columns", ["60", "80", "200"])
@pytest.mark.parametrize("command", [run, submit, manifest])
def test_help_all_lists_every_option_under_a_heading(run_in_fork, command, columns):
    done = run_in_fork(command.name, "--help-all", env={"COLUMNS": columns})
    assert done.returncode == 0
    headings = re.findall(r"^(\w.*):$", done.stdout, re.MULTILINE)
    options = done.stdout.partition(f"\n{headings[0]}:\n")[2]
    assert headings == [heading for heading, names in command.sections.items() if names]
    for param in command.params:
        if param.name not in ("target", "args") and not getattr(param, "hidden", False):
            assert len(re.findall(rf"^  (?:-\w, )?{param.opts[-1]}(?![\w-])", options, re.MULTILINE)) == 1, param.name
    assert max(map(len, done.stdout.splitlines())) <= 110


@pytest.mark.parametrize("columns", ["60", "80", "200"])
@pytest.mark.parametrize("command", [run, submit, manifest])
def test_help_shows_what_most_users_need(run_in_fork, command, columns):
    lines = run_in_fork(command.name, "--help", env={"COLUMNS": columns}).stdout.splitlines()
    options = lines[lines.index("Options:") :]
    shown = [match[1] for line in options if (match := re.match(r"  (?:-\w, )?(--[\w-]+)", line))]
    assert shown == [*command.common]
    assert len(lines) <= (70 if columns == "60" else 60)
    assert max(map(len, lines)) <= max(min(int(columns), 110), 105)


@pytest.mark.parametrize("command", [run, submit, manifest])
def test_examples_of_the_help_are_right(run_in_fork, command, tmp_path):
    write_program(tmp_path, "train.py", "def main(lr: float): print('--lr')\n")
    text = run_in_fork(command.name, "--help").stdout
    for what, line in command.examples:
        assert f"  # {what}\n  {line}\n" in text
        words = [word for word in shlex.split(line.partition(" | ")[0])[1:] if word not in ("--dry-run", "--follow")]
        done = run_in_fork(words[0], "--dry-run", *words[1:])
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["--help", "--help-all"])
def test_help_behind_a_target_is_the_targets(run_in_fork, tmp_path, name):
    write_program(tmp_path, "train.py", "")
    done = run_in_fork("run", "--dry-run", "--json", "train.py", name)
    assert json.loads(done.stdout)["ranks"][0]["argv"][-1] == name
    before = run_in_fork("run", "--nproc", "2", name, "train.py")
    assert before.stdout.startswith("Usage: ddplaunch run ")


@pytest.mark.parametrize("command", [submit, manifest])
def test_every_option_of_run_is_accepted_or_refused_with_a_reason(command):
    of_run = {param.opts[-1] for param in run.params}
    own = {param.opts[-1] for param in command.params}
    assert of_run <= own | set(command.refused_options)
    assert not set(command.refused_options) & own


@pytest.fixture
def complete(run_in_fork):
    """Return what the shell's completion function gets for a command line whose last word is being typed."""

    def run(words: str, shell: str = "bash", **environ: str) -> list[str]:
        place = words.split(" ")[-1] if shell == "fish" else str(len(words.split(" ")) - 1)
        typed = {"_DDPLAUNCH_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": place}
        done = run_in_fork(env={**typed, **environ})
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered(shell, run_in_fork, complete):
    done = run_in_fork(env={"_DDPLAUNCH_COMPLETE": f"{shell}_source"})
    assert (done.returncode, "_DDPLAUNCH_COMPLETE" in done.stdout) == (0, True)
    assert run_in_fork("completion", shell).stdout.strip() == done.stdout.strip()
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=done.stdout, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
    assert any("run" in line for line in complete("ddplaunch r", shell))


def test_another_shell_is_refused(run_in_fork):
    assert_refused(run_in_fork("completion", "csh"), "completion csh: expected bash, zsh or fish")


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("ddplaunch ", [f"plain,{name}" for name in COMMANDS]),
        ("ddplaunch run --np", ["plain,--nproc"]),
        ("ddplaunch run --help", ["plain,--help", "plain,--help-all"]),
        ("ddplaunch run --nproc 4 --dr", ["plain,--dry-run"]),
        ("ddplaunch run --start ex", ["plain,exec"]),
        ("ddplaunch run tr", ["file,tr"]),
        ("ddplaunch run --nproc 4 tr", ["file,tr"]),
        ("ddplaunch run -m pk", ["file,pk"]),
        ("ddplaunch run --log-dir ru", ["dir,ru"]),
        ("ddplaunch run train.py da", ["file,da"]),
        ("ddplaunch submit --gpus-per-n", ["plain,--gpus-per-node"]),
        ("ddplaunch submit --nodes 2 tr", ["file,tr"]),
        ("ddplaunch manifest --container-im", ["plain,--container-image"]),
        ("ddplaunch devices --j", ["plain,--json"]),
        ("ddplaunch run train.py : ", ["plain,main", "plain,measure"]),  # so has bash train.py:
        ("ddplaunch run train.py : ma", ["plain,main"]),
        ("ddplaunch submit --nodes 2 train.py : ma", ["plain,main"]),
        ("ddplaunch run no.py : ma", [""]),
    ],
)
def test_completions(complete, tmp_path, words, completions):
    write_program(tmp_path, "train.py", "def main(): pass\ndef _hidden(): pass\ndef measure(): pass\n")
    assert complete(words) == completions


@pytest.mark.parametrize("name", ["logs", "report", "wait", "clean", "stop"])
def test_names_of_runs_are_completed(complete, tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    keep(run_id="night-3")
    expected = [""] if name == "stop" else ["plain,night-3"]
    assert complete(f"ddplaunch {name} nigh", XDG_STATE_HOME=str(tmp_path)) == expected


def test_bash_completes_for_real(tmp_path):
    """A real bash calls the generated function, with the command on its PATH."""
    if not shutil.which("bash"):
        pytest.skip("no bash here")
    write_program(tmp_path, "bin/ddplaunch", f'#!/bin/sh\nexec {sys.executable} -m ddplaunch "$@"\n').chmod(0o755)
    script = """
    export PATH="$PWD/bin:$PATH"
    eval "$(_DDPLAUNCH_COMPLETE=bash_source ddplaunch)" || exit 1
    COMP_WORDS=(ddplaunch run --max-r) COMP_CWORD=2 COMPREPLY=()
    _ddplaunch_completion ddplaunch --max-r run
    echo "${COMPREPLY[@]}"
    COMP_WORDS=(ddplaunch run train.py : ma) COMP_CWORD=4 COMPREPLY=()
    _ddplaunch_completion ddplaunch ma :
    echo "${COMPREPLY[@]}"
    """
    write_program(tmp_path, "train.py", "def main(): pass")
    done = run_command(["bash", "-c", script], tmp_path)
    assert done.stdout == "--max-restarts\nmain\n", done.stderr
