"""Tests of host lists and hostfiles, with tables."""

import os
import shlex
import signal
import subprocess

import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.system.clusters.host_spec import Host, filter_hosts, parse_hosts, read_hostfile
from tests.conftest import ddplaunch_command, wait_until
from tests.scaled_timeouts import scaled_timeout

A, B, C = Host("a", 4), Host("b", 4), Host("c")

HOSTS = [
    (" a:4 , b:4 ", (A, B)),
    ("a:4,c", (A, C)),
    ("n[1,3]:8,a:4", (Host("n1", 8), Host("n3", 8), A)),
    ("n[08-10]", (Host("n08"), Host("n09"), Host("n10"))),
    ("r[1-2]n[1-2]:1", tuple(Host(f"r{r}n{n}", 1) for r in (1, 2) for n in (1, 2))),
    ("10.0.0.[1-2]:2", (Host("10.0.0.1", 2), Host("10.0.0.2", 2))),
    ("gpu-1.cluster_a.org:2", (Host("gpu-1.cluster_a.org", 2),)),
    ("me@a:4,you@n[1-2]", (Host("a", 4, user="me"), Host("n1", user="you"), Host("n2", user="you"))),
    ("[fd77::1]:4,[FD77:0::2]", (Host("fd77::1", 4), Host("fd77::2"))),
    ("me@[fe80::1%eth0]:2", (Host("fe80::1%eth0", 2, user="me"),)),
]

NOT_SLOTS = "is not a number of slots"

BAD_HOSTS = [
    ("", "--hosts is empty"),
    ("a,,b", "has no name"),
    ("b,a:0", "a has 0 slots"),
    ("[fd77::1]:0", r"\[fd77::1\] has 0 slots"),
    ("a:", f"'' {NOT_SLOTS}"),
    ("a:99999", "more than 4096"),
    ("a:²", NOT_SLOTS),
    ("n[1-3],n2", "n2 is named twice"),
    ("n[]", "expected a number"),
    ("n[1-99999999]", "more than 65536 nodes"),
    ("me@a,you@a", "a is named twice"),
    ("@a", "'' is not a user name"),
    ("-l@a", "'-l' .*user name"),
    ("me@", "'me@' is not a host"),
    ("fd77::1", "is not a host"),
    ("[fd77::1],[fd77:0::1]:4", "fd77::1 is named twice"),
    ("[fd77::x]:4", r"\[fd77::x\] is not an IPv6 address"),
    ("[fd77::1]4", "is not a host"),
    ("hôte", "cannot be read"),
    ("a:1_0", f"'1_0' {NOT_SLOTS}"),
    ("a:" + "9" * 5000, f"'9{{39}}…' {NOT_SLOTS}"),
    ("a" * 64, "at most 253 characters, and 1 to 63 between dots"),
    (".".join(["a" * 63] * 4), "at most 253 characters"),
    ("a," * 30_000 + "b", "a is named twice"),
    ("a\nb", "is not a host"),
    ("me\n-oProxyCommand=x@a", "not a user name|is not a host"),
    ("$(id)@a", r"'\$\(id\)' .*user name"),
    ("[fe80::1%$(id)]", r"\[fe80::1%\$\(id\)\] .*IPv6 address"),
    ("a;b", "cannot be read"),
]

FILES = [
    ("# ours\n\n  a   slots=4  # the first\n\tb:4#\nc\n", (A, B, C)),
    ("a:4\r\nb:4\r\n", (A, B)),
    ("\ufeffa:4\n", (A,)),
    ("n[1-2] slots=8\n", (Host("n1", 8), Host("n2", 8))),
    ("a slots = 4\nb slots=4 max_slots=8\n", (A, B)),
    ("a slots=4 max-slots=4\nb max_slots=4\nc\n", (A, B, C)),
    ("a\na\nb\na\nb\na\nb\nb\n", (A, B)),
    ("me@a\nme@a\n[fd77::1]\n[fd77::1]\n", (Host("a", 2, user="me"), Host("fd77::1", 2))),
    ("a 4 all.q@a UNDEFINED\nb 4 all.q@b <NULL>\n", (A, B)),
    ("a 3 all.q@a 0,0:0,2\na 1 gpu.q@a UNDEFINED\nb 4 all.q@b UNDEFINED\n", (A, B)),
    (
        "me@n1 slots=8\n[fd77::1] slots=2\n[fd77::2]:2",
        (Host("n1", 8, user="me"), Host("fd77::1", 2), Host("fd77::2", 2)),
    ),
]

BAD_FILES = [
    ("", "hosts has no hosts"),
    ("a\nb slots\n", "hosts:2: cannot read 'slots'"),
    ("a\n\nb slots=\n", f"hosts:3: '' {NOT_SLOTS}"),
    ("a slots=2 slots=2\n", "hosts:1: cannot read 'slots=2'"),
    ("a slots=4 max_slots=2\n", "hosts:1: slots=4 is more than max_slots=2"),
    ("a max_slots=2 max-slots=2\n", "hosts:1: cannot read 'max-slots=2'"),
    ("a cpus=4\n", "hosts:1: cannot read 'cpus=4'"),
    ("a 4 all.q@a UNDEFINED\na slots=4\n", "hosts:2: a is named twice, and before at .*hosts:1"),
    ("a four all.q@a UNDEFINED\n", "hosts:1: cannot read 'four'"),
    ("a 4 all.q@a\n", "hosts:1: cannot read '4'"),
    ("a\n" * 4097, "hosts:1: 4097 slots are more than 4096"),
    ("a:2 max_slots=2\n", "hosts:1: 'a:2 max_slots=2' has two numbers of slots"),
    ("slots=4\n", "hosts:1: .*cannot be read"),
    ("a\n# b\na:2\n", "hosts:3: a is named twice, and before at .*hosts:1"),
    ("a,b\n", "hosts:1: 'a,b' is not a host"),
    ("a" + " " * 500_000 + "b\n", "hosts:1: cannot read 'b'"),
    ("a\x00\n", "hosts:1: .*cannot be read"),
]


@pytest.mark.parametrize(("text", "hosts"), HOSTS)
def test_hosts(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(("text", "complaint"), BAD_HOSTS, ids=[text[:30] for text, _ in BAD_HOSTS])
def test_hosts_that_make_no_sense(text, complaint):
    with pytest.raises(UsageError, match=complaint) as caught:
        parse_hosts(text)
    assert caught.value.message.startswith("--hosts")
    assert caught.value.message.isprintable()
    assert len(caught.value.message) <= 400
    assert caught.value.hint


@pytest.mark.parametrize(("text", "hosts"), FILES)
def test_hostfiles_are_parsed(tmp_path, text, hosts):
    file = tmp_path / "hosts"
    file.write_bytes(text.encode())
    assert read_hostfile(str(file)) == hosts


@pytest.mark.parametrize(("text", "complaint"), BAD_FILES, ids=[text[:30] for text, _ in BAD_FILES])
def test_invalid_hostfiles_are_refused(tmp_path, text, complaint):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(UsageError, match=complaint) as caught:
        read_hostfile(str(file))
    assert caught.value.hint


def test_an_endless_hostfile_is_refused():
    with pytest.raises(UsageError, match="/dev/zero: more than 16777216 bytes"):
        read_hostfile("/dev/zero")


@pytest.mark.parametrize("shell", ["%s --hostfile <(echo n1 slots=2) %s", "echo n1:2 | %s --hostfile /dev/stdin %s"])
def test_a_hostfile_may_be_a_pipe(shell):
    words = shlex.join(ddplaunch_command("run", "--dry-run")), "--no-python /bin/true"
    done = subprocess.run(["bash", "-c", shell % words], capture_output=True, text=True, timeout=scaled_timeout(30))
    assert done.returncode == 0, done.stderr
    assert "n1" in done.stdout


def test_ctrl_c_while_no_process_writes(start_ddplaunch, tmp_path):
    os.mkfifo(tmp_path / "hosts")
    job = start_ddplaunch("run", "--hostfile", "hosts", "--no-python", "/bin/true")

    def opened():
        try:
            return os.open(tmp_path / "hosts", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return None

    writing: list[int] = []
    wait_until(lambda: (fd := opened()) is not None and not writing.append(fd), "a reader")

    def pressed():  # again: one that comes between opening and reading counts only when the reading ends
        job.signal(signal.SIGINT)
        return job.process.poll() is not None

    wait_until(pressed, "the end")
    assert job.wait() == 130
    os.close(writing[0])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="none: No such file"):
        read_hostfile(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="Is a directory"):
        read_hostfile(str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a text file"):
        read_hostfile(str(tmp_path / "bytes"))


CHOSEN = [
    (None, None, (A, B, C)),
    ("b@a", None, (A, B)),
    ("c:1,0", None, (Host("c", 2, (0, 1)),)),
    ("a@b:2,0", None, (A, Host("b", 2, (0, 2)))),
    (None, "a@c", (B,)),
    (None, "b:0", (A, Host("b", 3, (1, 2, 3)), C)),
    (None, "b:0,1,2,3", (A, C)),
]

BAD_CHOICES = [
    ("a", "b", "does not work with --exclude b"),
    ("", None, "has no name"),
    ("a@", None, "has no name"),
    ("d", None, "d is not among the hosts"),
    ("a:4", None, "a has no slot 4, only 0 to 3"),
    ("a:x", None, "'x' is not a slot of a"),
    ("a:1,1", None, "slot 1 of a is named twice"),
    ("a@a:1", None, "a is named twice"),
    (None, "a@b@c", "leaves no host"),
    (None, "c:0", "slots of c is not known"),
]


@pytest.mark.parametrize(("include", "exclude", "hosts"), CHOSEN)
def test_choices(include, exclude, hosts):
    assert filter_hosts((A, B, C), include, exclude) == hosts


def test_choices_of_users_and_addresses():
    hosts = (Host("a", 4, user="me"), Host("fd77::1", 4))
    assert filter_hosts(hosts, "[fd77::1]:0,2", None) == (Host("fd77::1", 2, (0, 2)),)
    assert filter_hosts(hosts, None, "[fd77::1]") == filter_hosts(hosts, "a", None) == hosts[:1]
    with pytest.raises(UsageError, match="fd77::2 "):
        filter_hosts(hosts, "[fd77::2]", None)


def test_an_address_of_ipv6_without_brackets():
    with pytest.raises(UsageError) as caught:
        parse_hosts("fd77::1")
    assert caught.value.hint == "write an IPv6 address in brackets: [fd00::1]:4"


@pytest.mark.parametrize(("include", "exclude", "complaint"), BAD_CHOICES)
def test_choices_that_make_no_sense(include, exclude, complaint):
    with pytest.raises(UsageError, match=complaint) as caught:
        filter_hosts((A, B, C), include, exclude)
    assert caught.value.hint
