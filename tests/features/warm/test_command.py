"""Tests of ``ddplaunch warm``, of ``--warm``, and of runs that get no warm zygote."""

import os
import re
import shlex
import socket
from contextlib import suppress

import pytest

from ddplaunch.core.rank import zygote_channel
from ddplaunch.features.warm import warm_sockets
from tests.conftest import assert_refused, write_program
from tests.features.warm.conftest import BUSY, ROOT, Shell


@pytest.mark.ci
def test_the_list_of_warm_zygotes(shell: Shell):
    assert shell.warm().stderr == "no warm zygotes\n"
    made = shell.run().made
    head, line = shell.warm().stdout.splitlines()
    assert head.split() == ["PID", "MEMORY", "AGE", "LEFT", "RUNS", "IMPORTED", "FOLDER"]
    assert re.fullmatch(rf"{made} +[\d.]+ [KM]iB +\d\S+ +(10m00s|9m\d\ds) +1 +torch +{shell.folder}", line)
    assert shell.warm("--stop").stderr == f"{made} stopped\n"
    assert shell.warm("--stop").stderr == "no warm zygotes\n"


@pytest.mark.ci
def test_the_config_file_and_the_options_that_override_it(shell: Shell):
    write_program(shell.folder, ".config/ddplaunch.toml", '[submit]\npartition = "a"\n[run]\nwarm = "5m"\n')
    plain = shell.launch("--log-dir", "log", "shows.py").replace(" --warm ", " ")
    shell.run(plain)
    if ROOT:
        assert shell.list_zygotes() == []
        assert shell.reasons("log") == ["as root only --warm keeps a zygote"]
    shell.run(plain.replace(" run ", " run --no-warm "))
    shell.run(f"DDPLAUNCH_WARM=0 {plain}")
    assert len(shell.list_zygotes()) == (not ROOT)
    made = shell.run(f"DDPLAUNCH_WARM=1 {plain}").made
    assert shell.list_zygotes() == [made]
    assert re.search(r" (5m00s|4m\d\ds) ", shell.warm().stdout)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[run]\nwarm = "soon"\n', '[run] warm = "soon": expected a time'),
        ("[run]\nwarm = true\n", "[run] warm = True: expected a time"),
        ("[run]\nwarn = 3\n", "unknown key warn in [run]"),
        ("run = 3\n", "[run] is not a table"),
    ],
)
def test_a_wrong_config_file_is_refused(run_in_fork, tmp_path, text, expected):
    write_program(tmp_path, "train.py", "")
    file = write_program(tmp_path, "config/ddplaunch.toml", text)
    done = run_in_fork("run", "--nproc", "2", "train.py", env={"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert_refused(done, f"Error: {file}: {expected}")


def test_a_project_file_may_not_set_warm(run_in_fork, tmp_path):
    write_program(tmp_path, "train.py", "")
    file = write_program(tmp_path, "pyproject.toml", '[tool.ddplaunch.run]\nwarm = "10m"\n')
    done = run_in_fork("run", "--dry-run", "train.py")
    assert f"{file}: unknown key warm in [tool.ddplaunch.run]\n  [run] warm goes into your own" in done.stderr


COLD = {
    "a scheduler started this run: SLURM_JOB_ID is set": ("SLURM_JOB_ID=1", "--cluster none"),
    "this run was started over SSH": ("DDPLAUNCH_OVER_SSH=1", ""),
    "modules named with --preload are not kept warm: threading": ("", "--preload threading"),
    "each rank is a new interpreter": ("", "--start exec"),
    "the launcher has pid 1": ("unshare --pid --fork --mount-proc", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("why", COLD)
def test_runs_that_start_cold(shared: Shell, why, tmp_path):
    before, options = COLD[why]
    if before.startswith("unshare") and not ROOT:
        pytest.skip("only root may unshare")
    write_program(shared.folder, "plain.py", "print('ran', flush=True)\n")
    done = shared.run(f"{before} {shared.launch('--log-dir', tmp_path, *options.split(), 'plain.py')}")
    assert done.stdout.count("ran") == 2, done.stderr
    assert why not in done.stderr
    assert shared.reasons(str(tmp_path)) == [why]


def test_a_folder_with_wrong_permissions_is_not_used(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    loose, link, good = (tmp_path / name for name in ("loose", "link", "good"))
    loose.mkdir()
    loose.chmod(0o770)
    link.symlink_to(good)
    monkeypatch.setattr(warm_sockets, "socket_dir_candidates", lambda name: [str(each) for each in (loose, link, good)])
    assert warm_sockets.warm_socket_dir() == str(good)
    assert warm_sockets.list_socket_paths() == []


@pytest.mark.slow
@pytest.mark.skipif(not ROOT, reason="only root may become another user")
def test_another_user_is_not_served(shell: Shell):
    made = shell.run().made
    (path,) = (shell.runtime / "ddplaunch-warm").iterdir()
    for folder in (shell.runtime, path.parent):
        folder.chmod(0o755)
    path.chmod(0o777)
    with socket.socket(socket.AF_UNIX) as asking:
        os.seteuid(65534)
        try:
            asking.connect(str(path))
        finally:
            os.seteuid(0)
        answer = b""
        with suppress(BrokenPipeError, ConnectionResetError):  # it hangs up, without reading
            zygote_channel.send_message(asking, {"op": "status"})
            answer = asking.recv(10)
        assert answer == b""
    for folder in (shell.runtime, path.parent):
        folder.chmod(0o700)
    assert shell.list_zygotes() == [made]


@pytest.mark.ci
def test_a_socket_of_another_program_delays_no_run(shell: Shell):
    made = shell.run().made
    (path,) = (shell.runtime / "ddplaunch-warm").iterdir()
    shell.warm("--stop")
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        shell.set_reply_timeout(0.2)
        done = shell.run(shell.launch("--log-dir", "log", "shows.py"))
        assert done.code == 0
        assert done.made != made
        assert shell.reasons("log") == [BUSY]
    path.unlink()


@pytest.mark.slow
def test_a_user_without_a_home(shell: Shell):
    assert shell.run(before="env -u HOME -u XDG_CONFIG_HOME").made == shell.run(before="env -u HOME").made


@pytest.mark.ci
@pytest.mark.skipif(not ROOT, reason="only root may mount")
def test_a_full_file_system_for_sockets(shell: Shell):
    """A run works without a warm zygote if the file system for its socket, such as /tmp, is full."""
    if shell.run(f"unshare --mount mount -t tmpfs none {shell.runtime}").code:
        pytest.skip("nothing can be mounted here")
    launch = shell.launch("--log-dir", "log", "shows.py")
    folders = f"mkdir -m 700 {shell.runtime}/ddplaunch {shell.runtime}/ddplaunch-warm"
    script = f"mount -t tmpfs -o nr_inodes=3,mode=700 none {shell.runtime} && {folders} && {launch}"
    done = shell.run(f"unshare --mount sh -c {shlex.quote(script)}")
    assert done.stdout.count("made") == 2, done.stderr
    assert "[Errno 28]" in shell.reasons("log")[0]
