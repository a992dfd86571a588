"""Tests that no rank and no child of one is left, whichever process of a run is killed."""

import os
import re
import signal

import pytest

from tests.conftest import is_alive, write_program
from tests.features.warm.conftest import Shell, parent, wait_for_exit, wait_for_text

pytestmark = pytest.mark.slow

LEAVES = """
import os, subprocess, time
own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
shell = subprocess.Popen(["sh", "-c", "setsid sleep 1000 & echo pid $!; exec sleep 1000"])
print(f"pid {os.getpid()}\\npid {own.pid}\\npid {shell.pid}\\nzygote {os.getppid()}", flush=True)
time.sleep(1000)
"""
PIDS = 8  # of two ranks and what they start

ALL = ("launcher", "zygote", "guardian", "warm")
KILLED = (
    ("launcher",),
    ("zygote",),
    ("guardian",),
    ("launcher", "guardian"),
    ("launcher", "warm"),
    ("zygote", "guardian"),
    pytest.param(("launcher", "zygote"), marks=pytest.mark.ci),
    pytest.param(("zygote", "warm"), marks=pytest.mark.ci),
)


def begin(shell: Shell) -> tuple[dict[str, int], list[int]]:
    """Start two ranks; return the processes above them by name, and the ranks with their children."""
    write_program(shell.folder, "leaves.py", LEAVES)
    launcher, out = shell.begin("exec " + shell.launch("leaves.py"))
    wait_for_text(out, "pid ", PIDS)
    text = wait_for_text(out, "zygote ", 2)
    zygote = int(re.findall(r"zygote (\d+)", text)[0])
    guardian = parent(zygote)
    above = {"launcher": launcher, "zygote": zygote, "guardian": guardian, "warm": parent(guardian)}
    assert len(set(above.values())) == 4
    return above, [int(pid) for pid in re.findall(r"pid (\d+)", text)]


def run_again(shell: Shell) -> int:
    """Run once more in the background, where a shell has SIGINT ignored; return the process that imported torch."""
    launcher, out = shell.begin("exec " + shell.launch("shows.py"))
    wait_for_exit(launcher)
    return int(re.findall(r"made (\d+)", out.read_text())[0])


@pytest.mark.ci
@pytest.mark.parametrize("killed", KILLED, ids="+".join)
def test_kill_9_leaves_no_process(shell: Shell, killed):
    above, below = begin(shell)
    for name in killed:
        os.kill(above[name], signal.SIGKILL)
    wait_for_exit(*(above[name] for name in ALL if name != "warm" or name in killed), *below)
    if "warm" not in killed:
        assert run_again(shell) == above["warm"], "it serves the next run"


@pytest.mark.ci
def test_a_run_continues_without_its_warm_zygote(shell: Shell):
    above, below = begin(shell)
    os.kill(above["warm"], signal.SIGKILL)
    wait_for_exit(above["warm"])
    assert all(map(is_alive, below))
    os.kill(above["launcher"], signal.SIGTERM)
    wait_for_exit(*above.values(), *below)
    assert run_again(shell), "its socket does not disturb the next run"


def test_the_signal_that_ended_a_zygote_is_reported(shell: Shell):
    write_program(
        shell.folder,
        "kills.py",
        "import os, signal, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getppid(), 9)\ntime.sleep(600)\n",
    )
    done = shell.run(shell.launch("kills.py"))
    assert done.code == 137
    assert re.search(r"the zygote \(pid \d+\) was ended by SIGKILL", done.stderr)


def test_a_restart_forks_from_the_same_zygote(shell: Shell):
    text = """
        import os, sys, torch
        print("made", torch.made, "parent", os.getppid(), flush=True)
        sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
    """
    write_program(shell.folder, "once.py", text)
    done = shell.run(shell.launch("--max-restarts", "1", "once.py"))
    assert done.code == 0, done.stderr
    assert [done.made] == shell.list_zygotes()
    assert len(set(re.findall(r"parent (\d+)", done.stdout))) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_warm_zygote_that_still_imports_ends_with_its_launcher(shell: Shell, number):
    import_slowly(shell)
    launcher, _ = shell.begin("exec " + shell.launch("shows.py"))
    warm = int(wait_for_text(shell.folder / "importing", "\n"))
    os.kill(launcher, number)
    wait_for_exit(launcher, warm)
    if number == signal.SIGKILL:
        (shell.folder / "go").touch()
        assert run_again(shell) != warm
    else:
        assert shell.warm("--stop").stderr == "no warm zygotes\n"
        assert not (shell.runtime / "ddplaunch-warm").exists()


def import_slowly(shell: Shell) -> None:
    """Make the import of torch write its pid to ``importing``, and wait for the file ``go``."""
    text = f"""
import time
with open({str(shell.folder / "importing")!r}, "a") as file:
    print(made, file=file)
while not os.path.exists({str(shell.folder / "go")!r}):
    time.sleep(0.01)
"""
    shell.torch_also(text)
