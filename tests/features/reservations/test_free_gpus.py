"""Tests of ``--gpus free:2``: real launchers on a machine with simulated GPUs."""

import os
import pwd
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddplaunch.features.reservations.claims import Claim, Claims, units_taken
from ddplaunch.features.reservations.options import MAX_JOBS
from ddplaunch.features.reservations.waiting import PlaceNeed
from tests.conftest import (
    PROGRAMS,
    BackgroundCommand,
    assert_refused,
    clean_environment,
    ddplaunch_command,
    run_command,
    wait_until,
)

pytestmark = pytest.mark.slow

CLAIM_GPUS = """
exec 8>"$1/${CUDA_VISIBLE_DEVICES%,*}" 9>"$1/${CUDA_VISIBLE_DEVICES#*,}"
flock -n 8 && flock -n 9 || echo "GPUs $CUDA_VISIBLE_DEVICES have two runs"
sleep 0.1
"""
"""A program that locks a file for each of its two GPUs while it runs, which fails if another one has the GPU."""

TARGET = PROGRAMS / "probe.py"
HOLD = 'echo "has $CUDA_VISIBLE_DEVICES"; while [ -e "$1" ]; do sleep 0.02; done'


def shell(script, *args):
    """Words after the options of run: one rank, which is a shell with this script."""
    return ("--nproc", "1", "--no-history", "--no-python", "sh", "-c", script, "sh", *map(str, args))


@pytest.fixture
def hold(start_ddplaunch, tmp_path):
    """Start a run that keeps its GPUs until the file that is returned with it is removed."""
    count = 0

    def start(*options, env):
        nonlocal count
        count += 1
        (file := tmp_path / f"held{count}").touch()
        return start_ddplaunch("run", *options, *shell(HOLD, file), env=env), file

    return start


def wait_for(job, text):
    def seen():
        return text in job.stderr() + job.stdout() or job.process.poll() is not None

    wait_until(seen, f"{text!r}: {job.stderr()}")
    assert text in job.stderr() + job.stdout(), job.stderr()


def visible(job):
    wait_for(job, "has ")
    return re.search(r"has (\S*)", job.stdout())[1]


@pytest.mark.ci
def test_linked_gpus_are_chosen_and_reserved_until_the_end(hold, machine):
    env = machine(4, links="0-3,1-2")
    first, file = hold("--gpus", "free:2", env=env)
    assert visible(first) == "0,3"
    assert "ddplaunch: reserved GPUs 0,3 until this run ends\n" in first.stderr()
    planned = run_command(ddplaunch_command("run", "--dry-run", "--gpus", "free:2", TARGET), file.parent, env)
    assert "CUDA_VISIBLE_DEVICES=1,2" in planned.stdout, planned
    again = run_command(ddplaunch_command("run", "--dry-run", "--gpus", "free:2", TARGET), file.parent, env)
    assert "CUDA_VISIBLE_DEVICES=1,2" in again.stdout, "a dry run reserves nothing"
    second, other = hold("--gpus", "free:2", env=env)
    assert visible(second) == "1,2"
    file.unlink()
    assert first.wait() == 0
    third, last = hold("--gpus", "free:2", env=env)
    assert visible(third) == "0,3"
    for each in (other, last):
        each.unlink()
    assert (second.wait(), third.wait()) == (0, 0)


@pytest.mark.ci
def test_too_few_are_free_and_the_error_says_who_has_them(hold, machine, tmp_path):
    me = os.getpid()
    env = machine(4, busy=[(1, me, 40000), (2, 4190000, 300)])
    job, file = hold("--gpus", "free:1", env=env)
    assert visible(job) == "0"
    done = run_command(ddplaunch_command("run", "--gpus", "free:2", *shell("true")), tmp_path, env)
    assert done.returncode == 69
    *users, error, hint = done.stderr.splitlines()
    assert re.fullmatch(rf"ddplaunch: GPU 0: \S+, run of PID {job.process.pid}, no memory in use yet, for .*", users[0])
    assert re.fullmatch(rf"ddplaunch: GPU 1: \S+, .+ {me}, 39.1 GiB, for .*", users[1])
    assert users[2:] == ["ddplaunch: GPU 2: unknown user, process 4190000, 300 MiB"]
    assert error == "Error: 2 free GPUs requested, but 1 of 4 is free"
    assert hint == "  --wait 2h waits for it, in order of arrival"
    late = run_command(ddplaunch_command("run", "--gpus", "free:2", "--wait", "1", *shell("true")), tmp_path, env)
    assert late.returncode == 69
    assert "Error: 2 free GPUs requested, but 1 of 4 is free after 1.0 s" in late.stderr
    file.unlink()
    assert job.wait() == 0


OTHER_USER = """
python=$1 uid=$2 gid=$3
shift 3
# Python may be in a home that only its owner enters: here, and only for this process, it has no such home around it.
python_home=$(dirname "$(dirname "$python")")
if ! setpriv --reuid "$uid" --regid "$gid" --clear-groups test -x "$python"; then
  closed=/$(echo "$python_home" | cut -d/ -f2)
  mount --bind "$python_home" /mnt
  mount -t tmpfs -o mode=755 none "$closed"
  mkdir -p "$python_home"
  mount --move /mnt "$python_home"
fi
exec setpriv --reuid "$uid" --regid "$gid" --clear-groups --inh-caps=-all "$@"
"""
"""Runs a command as another user: $1 is the interpreter itself, $2 and $3 are the user and the group."""


class OtherUsersRun(BackgroundCommand):
    """A launcher of the user nobody."""

    def __init__(self, folder, words, env):
        user = pwd.getpwnam("nobody")
        folder.mkdir()
        os.chown(folder, user.pw_uid, user.pw_gid)
        library = Path(env["LD_LIBRARY_PATH"])
        for each in {library, *library.parents, *folder.parents}:
            each.chmod(each.stat().st_mode | 0o011)
        home = dict.fromkeys(("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"), str(folder))
        switch = ["unshare", "--mount", "sh", "-ec", OTHER_USER, "sh", os.path.realpath(sys.executable)]
        command = [*switch, str(user.pw_uid), str(user.pw_gid), *ddplaunch_command("run", *words)]
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            given = {"cwd": folder, "env": clean_environment({**env, **home}), "stdin": subprocess.DEVNULL}
            self.process = subprocess.Popen(command, stdout=out, stderr=err, **given)


@pytest.mark.ci
def test_two_users_wait_in_one_line(hold, machine, tmp_path):
    """The second user's launcher may neither write to the first one's files nor signal its processes."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root, and mount namespaces, to be two users")
    env = machine(4)
    first, file = hold("--gpus", "free:2", env=env)
    assert visible(first) == "0,1"
    refused = OtherUsersRun(tmp_path / "a", ("--gpus", "free:3", *shell("true")), env)
    assert refused.wait() == 69, refused.stderr()
    assert f"ddplaunch: GPUs 0-1: root, run of PID {first.process.pid}, " in refused.stderr()
    assert "Error: 3 free GPUs requested, but 2 of 4 are free" in refused.stderr()

    (theirs := tmp_path / "theirs").touch()
    second = OtherUsersRun(tmp_path / "b", ("--gpus", "free:3", "--wait", "60", *shell(HOLD, theirs)), env)
    wait_for(second, "waiting for 3 free GPUs")
    third, last = hold("--gpus", "free:1", "--wait", "60", env=env)
    wait_for(third, "waiting for 1 free GPU")
    file.unlink()
    assert first.wait() == 0
    assert (visible(second), visible(third)) == ("0,1,2", "3")
    for each in (theirs, last):
        each.unlink()
    assert (second.wait(), third.wait()) == (0, 0)


def test_memory_that_no_visible_process_has_counts(machine, tmp_path):
    env = machine(2, busy=[(0, 4190000, 5000)])
    done = run_command(ddplaunch_command("run", "--dry-run", "--gpus", "free:1", TARGET), tmp_path, env)
    assert "CUDA_VISIBLE_DEVICES=1 " in done.stdout


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--gpus", "free:9"), ("--gpus free:9: this machine has 4 whole GPUs", "ddplaunch devices")),
        (("--gpus", "free:0"), ("--gpus free:0: expected a number of free GPUs", "--gpus free:2")),
        (("--gpus", "free"), ("--gpus free: expected a number of free GPUs",)),
        (("--wait", "3"), ("--wait has nothing to wait for", "--gpus free:2, or --jobs 4")),
        (("--jobs", "0"), ("--jobs 0: expected a number of runs, 1 or more, or auto",)),
        (("--command", "--name", "x", "--gpus", "1", "true", ":", "--gpus", "free:2"), ("for the ranks alone, and x",)),
        (("--command", "--name", "x", "--gpus", "1", "true", ":", "--gpus", "FREE:2"), ("for the ranks alone, and x",)),
        (("--gpus", " FREE:9", "--wait", "3"), ("free:9: this machine has 4 whole GPUs",)),
    ],
)
def test_what_cannot_be_meant_is_refused(machine, tmp_path, words, parts):
    assert_refused(run_command(ddplaunch_command("run", *words, TARGET), tmp_path, machine(4)), *parts)


def test_a_mask_and_mig_restrict_the_choice(machine, tmp_path):
    env = machine(4, mig={1: 2})
    words = ddplaunch_command("run", "--dry-run", "--gpus", "free:2", TARGET)
    masked = run_command(words, tmp_path, {**env, "CUDA_VISIBLE_DEVICES": "1,2,3"})
    assert re.search(r"CUDA_VISIBLE_DEVICES=(2,3|GPU-\S+2,GPU-\S+3) ", masked.stdout), masked
    few = run_command(words, tmp_path, {**env, "CUDA_VISIBLE_DEVICES": "1,2"})
    assert_refused(few, "--gpus free:2: CUDA_VISIBLE_DEVICES=1,2 leaves 1 whole GPU")


def test_a_folder_for_locks_that_cannot_be_used(machine, tmp_path):
    env = {**machine(4), "DDPLAUNCH_LOCK_DIR": str(tmp_path / "no")}
    done = run_command(ddplaunch_command("run", "--gpus", "free:2", *shell("true")), tmp_path, env)
    assert_refused(done, f"DDPLAUNCH_LOCK_DIR={tmp_path}/no: there is no such folder", "mkdir -m 1777")


@pytest.mark.ci
def test_a_run_on_named_gpus_keeps_others_from_reserving_them(hold, machine):
    env = machine(4)
    named, file = hold("--gpus", "0,1", env=env)
    assert visible(named) == "0,1"
    # It has one rank, so only its first GPU is sure to be used.
    free, other = hold("--gpus", "free:3", env=env)
    assert visible(free) == "1,2,3"
    late, last = hold("--gpus", "1", env=env)
    wait_for(late, "has reserved GPUs of this run")
    for each in (file, other, last):
        each.unlink()
    assert [job.wait() for job in (named, free, late)] == [0, 0, 0]


@pytest.mark.ci
def test_twenty_launchers_at_once_never_share_a_gpu(start_ddplaunch, machine, tmp_path, locks):
    """Three of them are killed while they wait or run: their GPUs are free again."""
    (used := tmp_path / "used").mkdir()
    env = machine(4)
    words = ("run", "--gpus", "free:2", "--wait", "10m", *shell(CLAIM_GPUS, used))
    jobs = [start_ddplaunch(*words, env=env) for _ in range(20)]
    for job in jobs[5::7]:
        wait_for(job, "ddplaunch: ")
        job.process.send_signal(signal.SIGKILL)
    codes = [job.wait() for job in jobs]
    said = "".join(job.stdout() + job.stderr() for job in jobs)
    assert codes.count(0) >= 17, said
    assert {*codes} <= {0, -signal.SIGKILL}
    assert "have two runs" not in said
    assert said.count("reserved GPUs") >= 17
    again = run_command(ddplaunch_command("run", "--gpus", "free:4", *shell("true")), tmp_path, env)
    assert again.returncode == 0, again
    assert [path.name for path in locks.iterdir()] == ["ddplaunch-claims.lock"]


@pytest.mark.ci
def test_they_are_served_in_order_of_arrival_and_a_kill_frees(hold, machine):
    env = machine(4)
    holder, _ = hold("--gpus", "free:3", env=env)
    visible(holder)
    waiting = []
    for number, count in enumerate((4, 1, 2)):
        waiting.append(hold("--gpus", f"free:{count}", "--wait", "10m", env=env))
        place = "next in line" if number == 0 else f"{number} run{'s' * (number > 1)} before this one"
        wait_for(waiting[-1][0], place)
    time.sleep(0.3)  # one GPU is free all the time: the second must not take it before the first has had its turn
    assert [job.stdout() for job, _ in waiting] == ["", "", ""]
    holder.process.kill()
    (four, file), (one, other), (two, last) = waiting
    assert visible(four) == "0,1,2,3"
    wait_for(one, "next in line")
    assert one.stdout() == ""
    file.unlink()
    assert len(visible(one)) == 1
    assert len(visible(two)) == 3
    other.unlink(), last.unlink()
    assert [job.wait() for job, _ in waiting] == [0, 0, 0]


@pytest.mark.ci
def test_jobs_limits_how_many_run(hold, machine):
    env = machine(0)
    first, file = hold("--jobs", "1", env=env)
    visible(first)
    second, other = hold("--jobs", "1", "--wait", "10m", env=env)
    wait_for(second, "ddplaunch: waiting for a place (--jobs 1), at most 10 min: next in line")
    third, last = hold("--jobs", "2", "--wait", "10m", env=env)
    wait_for(third, "1 run before this one")
    second.process.terminate()
    assert second.wait() == -signal.SIGTERM
    visible(third)
    file.unlink(), last.unlink(), other.unlink()
    assert (first.wait(), third.wait()) == (0, 0)


def add_claim(claims, units, *, waits=False):
    return claims.add(Claim("jobs-0", "a place", os.getpid(), units=tuple(map(str, units))), waits=waits)


def test_others_see_a_run_that_waits_for_one_of_most_places(locks):
    """Its claim names all places."""
    claims = Claims(str(locks))
    own = add_claim(claims, range(MAX_JOBS), waits=True)
    assert [len(each.claim.units) for each in claims.list(None)] == [MAX_JOBS]
    own.release()


def test_places_of_runs_with_a_greater_limit_count(locks):
    """Of four runs with ``--jobs 4``, the first two have ended."""
    claims, need = Claims(str(locks)), PlaceNeed("jobs-0", "a place (--jobs 2)", 1, 2)
    held = [add_claim(claims, [unit]) for unit in (2, 3)]
    assert need.choose(units_taken(claims.list("jobs-0"))) is None
    held[0].release()
    assert need.choose(units_taken(claims.list("jobs-0"))) == ("0",)
    held[1].release()
