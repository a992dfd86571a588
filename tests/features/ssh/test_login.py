"""Tests of jobs over SSH where login shells print text or ssh is configured for interactive use."""

import re
import shutil
import signal

import pytest

from ddplaunch.features.ssh.ssh_session import FISH_TEXT
from tests.conftest import wait_until, write_program
from tests.features.ssh.job import Job, refusal
from tests.start_modes import LIGHT

pytestmark = [pytest.mark.ci, pytest.mark.slow]


def log_in_by(host, folder, bashrc: str = "", shell: str = "bash") -> None:
    """Let root of a host have this start file and this login shell."""
    home = folder / f"home-{host.name}"
    write_program(home, ".bashrc", bashrc)
    users = f"root:x:0:0:root:{home}:{shutil.which(shell) or shell}\nsshd:x:100:65534::/run/sshd:/bin/false\n"
    passwd = write_program(folder, f"passwd-{host.name}", users)
    host.run("mount", "--bind", passwd, "/etc/passwd")


WORK = [
    ("echo hello; echo there >&2", "bash"),
    ("printf 'loading...\\rloaded'", "bash"),
    ("printf '\\036ddplaunch no newline'", "bash"),
    ("yes greetings | head -n 200000", "bash"),
    ("read line", "bash"),
    ("exec sh", "bash"),
    ("exec zsh", "bash"),
    ("exec tcsh", "bash"),
    ("", "zsh"),
    ("", "tcsh"),
    ("", "fish"),
]
"""Start files of bash, and login shells."""


def test_login_shells_that_print_or_make_way(sshd, tmp_path):
    write_program(tmp_path, "train.py", "import os\nprint('up', os.environ['LD_LIBRARY_PATH'])\n")
    known = [row for row in WORK if all(map(shutil.which, [row[1], *re.findall("exec ([a-z]+)", row[0])]))]
    servers = sshd(len(known) + 1)
    for host, (bashrc, shell) in zip(servers.network.hosts[1:], known, strict=True):
        log_in_by(host, tmp_path, bashrc, shell)
    odd = {"LD_LIBRARY_PATH": "/it's $x"}
    run = Job(servers, tmp_path, "--hosts", f"n[1-{len(known)}]:1", *LIGHT, "train.py", env=odd)
    assert run.wait() == 0, run.stderr()
    width = len(f"[{len(known) - 1}] ")
    assert sorted(run.stdout().splitlines()) == sorted(
        f"[{rank}] ".ljust(width) + "up /it's $x" for rank in range(len(known))
    )
    run.assert_nothing_left()


def test_login_shells_that_keep_ddplaunch_out_are_named(sshd, tmp_path):
    """The error names a login shell that exits at once, and one that never runs the command."""
    write_program(tmp_path, "train.py", "")
    servers = sshd(7)
    start_files = ["exit 0", "exit 3", "echo 'no logins on \033[31mFriday' >&2; exit 4", "", "cat", "exec fish"]
    for host, bashrc in zip(servers.network.hosts[1:], start_files, strict=True):
        log_in_by(host, tmp_path, bashrc, "/usr/sbin/nologin" if not bashrc else "bash")
    run = Job(servers, tmp_path, "--hosts", "n[1-4]:1", *LIGHT, "train.py")
    assert run.wait() == 2
    ended = "the login shell exited before ddplaunch started (exit code {}): does one of its start files call exit?"
    assert run.stderr().splitlines() == [
        refusal(4, 4),
        f"  n1  {ended.format(0)}",
        f"  n2  {ended.format(3)}",
        "  n3  no logins on Friday",
        "  n4  This account is currently not available.",
    ]
    if shutil.which("fish"):
        run = Job(servers, tmp_path, "--hosts", "n0:1,n6:1", *LIGHT, "train.py")
        assert run.wait() == 69
        assert run.stderr().splitlines()[-2:] == [refusal(1, 2), f"  n6  {FISH_TEXT}"]
        run.assert_nothing_left()
    run = Job(servers, tmp_path, "--hosts", "n0:1,n5:1", *LIGHT, "train.py")
    note = "ddplaunch: waiting for n5; does `ssh n5 true` work without a prompt?\n"
    wait_until(lambda: run.stderr() == note, "the note", 15)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    run.assert_nothing_left()
