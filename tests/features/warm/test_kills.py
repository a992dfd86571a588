"""Tests that nothing of a run is left, whichever process is killed: no rank, and no process of one."""

import itertools
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
PAIRS = [each for count in (1, 2) for each in itertools.combinations(ALL, count)]


def begin(shell: Shell) -> tuple[dict[str, int], list[int]]:
    """Start two ranks; return who is above them, and them with all that they have started."""
    write_program(shell.folder, "leaves.py", LEAVES)
    launcher, out = shell.begin("exec " + shell.launch("leaves.py"))
    wait_for_text(out, "pid ", PIDS)
    text = wait_for_text(out, "zygote ", 2)
    zygote = int(re.findall(r"zygote (\d+)", text)[0])
    guardian = parent(zygote)
    above = {"launcher": launcher, "zygote": zygote, "guardian": guardian, "warm": parent(guardian)}
    assert len(set(above.values())) == 4
    return above, [int(pid) for pid in re.findall(r"pid (\d+)", text)]


def again(shell: Shell) -> int:
    """Run once more in the background, where a shell has SIGINT ignored; return who imported for it."""
    launcher, out = shell.begin("exec " + shell.launch("shows.py"))
    wait_for_exit(launcher)
    return int(re.findall(r"made (\d+)", out.read_text())[0])


@pytest.mark.parametrize(
    "killed", [each for each in PAIRS if each not in (("guardian", "warm"), ("warm",))], ids="+".join
)
def test_kill_9_leaves_nothing(shell: Shell, killed):
    above, below = begin(shell)
    for name in killed:
        os.kill(above[name], signal.SIGKILL)
    wait_for_exit(*(above[name] for name in ALL if name != "warm"), *below)
    assert is_alive(above["warm"]) == ("warm" not in killed)
    if "warm" not in killed:
        assert again(shell) == above["warm"], "it serves on"


def test_a_run_goes_on_without_its_warm_zygote_and_leaves_nothing(shell: Shell):
    above, below = begin(shell)
    os.kill(above["warm"], signal.SIGKILL)
    wait_for_exit(above["warm"])
    assert all(map(is_alive, below))
    os.kill(above["launcher"], signal.SIGTERM)
    wait_for_exit(*above.values(), *below)
    assert again(shell), "the socket that it left is in nobody's way"


def test_what_kills_a_zygote_is_reported_as_ever(shell: Shell):
    write_program(
        shell.folder,
        "kills.py",
        "import os, signal, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getppid(), 9)\ntime.sleep(600)\n",
    )
    done = shell.run(shell.launch("kills.py"))
    assert done.code == 137
    assert re.search(r"the zygote \(pid \d+\) was ended by SIGKILL", done.stderr)


def test_restarts_come_of_the_same_zygote(shell: Shell):
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


def test_one_that_is_killed_while_it_imports_goes_at_once(shell: Shell):
    import_slowly(shell)
    launcher, _ = shell.begin("exec " + shell.launch("shows.py"))
    warm = int(wait_for_text(shell.folder / "importing", "\n"))
    os.kill(launcher, signal.SIGKILL)
    wait_for_exit(launcher, warm)
    (shell.folder / "go").touch()
    assert again(shell) != warm


def test_a_stop_ends_it_while_it_imports(shell: Shell):
    import_slowly(shell)
    launcher, _ = shell.begin("exec " + shell.launch("shows.py"))
    warm = int(wait_for_text(shell.folder / "importing", "\n"))
    os.kill(launcher, signal.SIGTERM)
    wait_for_exit(launcher, warm)
    assert warm not in shell.list_zygotes()
    shell.warm("--stop")
    assert not (shell.runtime / "ddplaunch-warm").exists()


def import_slowly(shell: Shell) -> None:
    """Have the import of torch say that it has begun, and wait for a file."""
    text = f"""
import time
with open({str(shell.folder / "importing")!r}, "a") as file:
    print(made, file=file)
while not os.path.exists({str(shell.folder / "go")!r}):
    time.sleep(0.01)
"""
    shell.torch_also(text)
