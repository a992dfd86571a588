"""Tests of programs beside a target on one machine: when they start, what their end means, and what is left."""

import os
import random
import re
import signal
import socket
import sys
import time

import pytest

from tests.conftest import PROGRAMS, free_port, is_alive, read_events, wait_until, write_program
from tests.fake_nvml import fake_nvml as fake_nvml
from tests.scaled_timeouts import scaled_timeout
from tests.start_modes import EXEC

pytestmark = pytest.mark.slow

PYTHON = sys.executable
CLIENT = PROGRAMS / "client.py"
URL = "http://{vllm}/x"
RANKS = ("--nproc", "2", *EXEC, CLIENT, URL)


def server(*how, name="vllm", ready="http:/health", options=()):
    """The words of a part with the server."""
    first = ("--command", "--name", name, *(("--ready", ready) if ready else ()), *options)
    return (*first, PYTHON, PROGRAMS / "server.py", "{port}", *how, ":")


@pytest.fixture
def begin(start_ddplaunch):
    """Start a job of which nothing is left at the end of the test."""
    jobs = []

    def start(*words, **options):
        jobs.append(start_ddplaunch("run", *words, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.wait()
        job.assert_nothing_left()


def wait_for_note(job, text):
    wait_until(lambda: text in job.stderr() or job.process.poll() is not None, f"{text!r}: {job.stderr()}")
    assert text in job.stderr()


def pid_of(job, name="vllm"):
    wait_for_note(job, f"[{name}] server ")
    return int(re.search(rf"\[{name}\] server (\d+)", job.stderr())[1])


def touch(folder, name):
    (folder / name).touch()


@pytest.mark.ci
@pytest.mark.smoke
def test_the_ranks_start_when_the_server_is_ready_and_it_ends_after_them(begin, tmp_path):
    job = begin("--log-dir", "logs", *server("late=0.5"), *RANKS, "once")
    assert job.wait() == 2, "options of the job stand in the part with the target"
    assert "--log-dir does not work with --command" in job.stderr()
    job = begin(*server("late=0.5"), "--log-dir", "logs", *RANKS, "once")
    assert job.wait() == 0
    port = re.search(r"vllm: port (\d+)", job.stderr())[1]
    assert job.stdout().count(f"got ok from http://127.0.0.1:{port}/x") == 2
    assert re.search(rf"ddplaunch: vllm is ready at 127.0.0.1:{port} after \d\.\d s", job.stderr())
    assert job.stderr().rstrip().endswith("log folder: logs/" + os.listdir(tmp_path / "logs")[0])
    kinds = [each["event"] for each in read_events(tmp_path / "logs")]
    order = [
        kinds.index(kind)
        for kind in ("program_started", "program_ready", "rank_started", "rank_exited", "attempt_swept")
    ]
    assert order == sorted(order)
    (log,) = (tmp_path / "logs").glob("*/vllm.log")
    assert log.read_text().endswith("listening\nasked to end\n")


@pytest.mark.ci
def test_services_start_in_order_and_end_in_reverse(begin):
    env = server(name="env", ready="tcp", options=("--after", "vllm"))
    job = begin(*env, *server("late=0.3"), *RANKS, "once")
    assert job.wait() == 0
    lines = [line for line in job.stderr().splitlines() if "is ready" in line or "asked to end" in line]
    assert [re.sub(r" at .*", "", line) for line in lines] == [
        "ddplaunch: vllm is ready",
        "ddplaunch: env is ready",
        "[env] asked to end",
        "[vllm] asked to end",
    ]


@pytest.mark.parametrize(
    ("code", "exit_code", "how"),
    [
        (3, 3, "exited with code 3"),
        (0, 1, "exited with code 0"),
        (-9, 137, "was ended by SIGKILL (killed from outside)"),
    ],
)
def test_a_server_that_ends_before_it_is_ready_ends_the_wait_at_once(begin, tmp_path, code, exit_code, how):
    job = begin(*server("late=1000", f"exit={code}"), *RANKS)
    wait_for_note(job, "waiting for vllm (http:/health)")
    began = time.monotonic()
    touch(tmp_path, "end")
    assert job.wait() == exit_code
    assert time.monotonic() - began < scaled_timeout(1)
    assert f"ddplaunch: vllm {how} before it was ready: the end (exit code {exit_code})\n" in job.stderr()
    assert job.stdout() == ""


def test_a_server_that_is_not_ready_in_time(begin):
    job = begin(*server("late=1000", options=("--ready-timeout", "0.5")), *RANKS)
    assert job.wait() == 124
    assert re.search(r"vllm was not ready within 0.5s \(http:/health\): .*\(exit code 124\)", job.stderr())


@pytest.mark.ci
@pytest.mark.parametrize(("code", "exit_code"), [(0, 1), (7, 7), (-9, 137)])
def test_a_server_that_ends_while_the_ranks_run(begin, tmp_path, code, exit_code):
    job = begin(*server(f"exit={code}"), *RANKS)
    job.wait_for("got ok", 2)
    touch(tmp_path, "end")
    assert job.wait() == exit_code
    how = "was ended by SIGKILL (killed from outside)" if code < 0 else f"exited with code {code}"
    reason = f"vllm {how} before client.py was done"
    assert f"ddplaunch: {reason}: stopping the ranks\n" in job.stderr()
    text = job.stderr()[job.stderr().index(f"{reason} (exit code {exit_code})") :]
    assert "its last lines:" in text
    assert "  | the end" in text
    assert "meanwhile: ranks 0, 1: " in text


def test_ranks_that_lose_their_server_are_not_the_cause(begin, tmp_path):
    """They fail with a lost connection, perhaps before the end of the server is known."""
    job = begin(*server("exit=-9"), *RANKS, "ask")
    job.wait_for("got ok", 2)
    touch(tmp_path, "end")
    assert job.wait() == 137
    assert "vllm was ended by SIGKILL (killed from outside) before client.py was done (exit code 137)" in job.stderr()


FORKS_AWAY = """
import os, sys, time, socket
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while not os.path.exists("end"):
    time.sleep(0.01)
listening.close()
while not os.path.exists("later"):
    time.sleep(0.01)
sys.exit(6)
"""


def test_a_server_that_stops_listening_before_it_ends_is_the_cause(begin, tmp_path):
    """All ranks have ended by then, with an error of their connections."""
    write_program(tmp_path, "slow.py", FORKS_AWAY)
    write_program(
        tmp_path,
        "connects.py",
        """
        import os, socket, sys, time
        host, port = sys.argv[1].split(":")
        print("up", flush=True)
        while True:
            socket.create_connection((host, int(port))).close()
            time.sleep(0.02)
        """,
    )
    command = ("--command", "--name", "vllm", PYTHON, "slow.py", "{port}", ":")
    job = begin(*command, "--nproc", "2", *EXEC, "connects.py", "{vllm}")
    job.wait_for("up", 2)
    touch(tmp_path, "end")
    wait_until(lambda: job.stderr().count("ConnectionRefusedError") >= 2, "both tracebacks")
    touch(tmp_path, "later")
    assert job.wait() == 6
    assert "vllm exited with code 6 before connects.py was done (exit code 6)" in job.stderr()
    assert re.search(r"meanwhile: rank \d failed with ConnectionRefusedError", job.stderr())


def test_a_rank_that_fails_is_the_cause_and_the_server_ends_last(begin, tmp_path):
    touch(tmp_path, "go")
    job = begin(*server(), *RANKS, "exit=5")
    assert job.wait() == 5
    lines = job.stderr().splitlines()
    assert "rank 1 exited with code 5" in job.stderr()
    assert lines[-1] == "[vllm] asked to end"


@pytest.mark.ci
@pytest.mark.parametrize("code", [0, 9])
def test_the_job_lasts_until_a_main_command_ends(begin, tmp_path, code):
    waits = f"while ! test -e end; do sleep 0.01; done; exit {code}"
    main = ("--command", "--name", "orch", "--kind", "main", "--after", "vllm", "sh", "-c", waits, ":")
    job = begin(*server(), *main, *RANKS, "once")
    job.wait_for("got ok", 2)
    wait_until(lambda: {*job.find("client.py")} <= {job.process.pid}, "the end of the ranks")
    assert is_alive(pid_of(job))
    touch(tmp_path, "end")
    assert job.wait() == code
    assert ("orch exited with code 9 (exit code 9)" in job.stderr()) is bool(code)
    assert "asked to end" in job.stderr()


@pytest.mark.ci
def test_a_sidecar_that_ends_is_only_noted(begin, tmp_path):
    tb = ("--command", "--name", "tb", "--kind", "sidecar", "sh", "-c", "echo no events; exit 4", ":")
    job = begin(*tb, *server(), *RANKS)
    wait_for_note(job, "tb exited with code 4, the job continues: no events")
    job.wait_for("got ok", 2)
    touch(tmp_path, "go")
    assert job.wait() == 0


MAIN = ("--command", "--name", "orch", "--kind", "main", "sleep", "1000", ":")


@pytest.mark.ci
def test_ctrl_c_while_the_ranks_run(begin):
    """Ranks and mains get it; a rank that saves may still ask the server, which ends last."""
    job = begin(*server(), *MAIN, *RANKS)
    job.wait_for("got ok", 2)
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.stdout().count("has saved") == 2
    assert job.stderr().splitlines()[-1] == "[vllm] asked to end"


@pytest.mark.ci
def test_ctrl_c_while_a_server_is_awaited_and_while_only_a_main_is_left(begin, tmp_path):
    job = begin(*server("late=1000"), *RANKS)
    wait_for_note(job, "waiting for vllm")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    touch(tmp_path, "go")
    job = begin(*server(), *MAIN, *RANKS)
    job.wait_for("got ok", 2)
    wait_until(lambda: {*job.find("client.py")} <= {job.process.pid}, "the end of the ranks")
    job.signal(signal.SIGINT)
    assert job.wait() == 130


@pytest.mark.ci
def test_ctrl_c_again_kills_a_server_that_ignores_sigterm(begin):
    job = begin(*server("deaf"), *RANKS, "once")
    job.wait_for("got ok", 2)
    wait_until(lambda: {*job.find("client.py")} <= {job.process.pid}, "the end of the ranks")
    pid = pid_of(job)

    def has_ended_after_ctrl_c() -> bool:
        job.signal(signal.SIGINT)
        return job.process.poll() is not None

    wait_until(has_ended_after_ctrl_c, "the end of the job", 10)
    assert job.wait() in (0, 130)
    assert not is_alive(pid)


@pytest.mark.ci
def test_sigterm_ends_the_job(begin):
    job = begin(*server(), *RANKS)
    job.wait_for("got ok", 2)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    assert "asked to end" in job.stderr()


NOTICES = """
import signal, sys
def on_notice(*_):
    print("noticed", flush=True)
    open("go", "w").close()
    sys.exit()
signal.signal(signal.SIGUSR2, on_notice)
print("main", flush=True)
signal.pause()
"""


@pytest.mark.ci
def test_a_preemption_reaches_mains_and_no_server(begin, tmp_path):
    write_program(tmp_path, "notices.py", NOTICES)
    main = ("--command", "--name", "orch", "--kind", "main", PYTHON, "notices.py", ":")
    job = begin(*server(), *main, *RANKS)
    job.wait_for("got ok", 2)
    wait_for_note(job, "[orch] main")
    job.signal(signal.SIGUSR2)
    wait_for_note(job, "[orch] noticed")
    assert job.wait() in (0, 75)
    assert job.stderr().index("noticed") < job.stderr().index("[vllm] asked to end")


@pytest.mark.ci
def test_a_server_that_ignores_sigterm_is_killed_after_its_grace(begin):
    job = begin(*server("deaf", options=("--grace", "0.5")), *RANKS, "once")
    assert job.wait() == 0
    assert "ddplaunch: vllm did not end within 0.5 s of SIGTERM, and was killed\n" in job.stderr()


@pytest.mark.parametrize("seed", range(6))
def test_kill_9_of_the_launcher_leaves_nothing(begin, seed):
    """At any moment; also of what a server has started in sessions of their own."""
    moment = random.Random(seed + time.time_ns()).uniform(0.1, 1.2)
    job = begin(*server("children", "late=0.2"), *RANKS)
    time.sleep(moment)  # the thing tested is a random moment
    job.signal(signal.SIGKILL)
    assert job.wait() == -9


def parent(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


@pytest.mark.ci
def test_kill_9_of_the_guard_and_of_the_server(begin):
    job = begin(*server("children"), *RANKS)
    job.wait_for("got ok", 2)
    os.kill(parent(pid_of(job)), signal.SIGKILL)
    assert job.wait() == 137
    assert "vllm ended because their guard process was killed (exit code 137)" in job.stderr()
    job = begin(*server("children"), *RANKS)
    job.wait_for("got ok", 2)
    os.kill(pid_of(job), signal.SIGKILL)
    assert job.wait() == 137


@pytest.mark.ci
def test_sigterm_is_for_the_leader_and_then_for_what_a_wrapper_leaves(begin, tmp_path):
    job = begin(*server("worker"), *RANKS, "once")
    assert job.wait() == 0
    assert job.stderr().count("asked to end") == 2, "first the server, then the worker that it has left"
    script = f"{PYTHON} {PROGRAMS / 'server.py'} {{port}}; true"
    job = begin("--command", "--name", "vllm", "sh", "-c", script, ":", *RANKS, "once")
    assert job.wait() == 0
    assert "asked to end" in job.stderr()


ONCE = """
import os, sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5).read()
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
sys.exit(4 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


@pytest.mark.ci
def test_a_restart_starts_all_programs_again_at_the_same_address(begin, tmp_path):
    write_program(tmp_path, "once.py", ONCE)
    tb = ("--command", "--name", "tb", "--kind", "sidecar", "sh", "-c", "echo tb $$; exec sleep 1000", ":")
    words = ("--max-restarts", "1", "--log-dir", "logs", "--nproc", "2", *EXEC, "once.py", URL)
    job = begin(*tb, *server(), *words)
    assert job.wait() == 0
    addresses = re.findall(r"vllm is ready at (\S+)", job.stderr())
    assert len(addresses) == 2
    assert len(set(addresses)) == 1
    assert job.stderr().count("[tb] tb") == 1
    (folder,) = (tmp_path / "logs").iterdir()
    assert {"vllm.log", "vllm.attempt-1.log", "tb.log"} <= {path.name for path in folder.iterdir()}


@pytest.mark.ci
def test_a_restart_after_the_end_of_a_server(begin, tmp_path):
    script = "test -e ended && exec $0 $1 $2; touch ended; exec $0 $1 $2 exit=3"
    command = ("--command", "--name", "vllm", "sh", "-c", script, PYTHON, PROGRAMS / "server.py", "{port}", ":")
    job = begin(*command, "--max-restarts", "1", *RANKS)
    job.wait_for("got ok", 2)
    touch(tmp_path, "end")
    wait_for_note(job, "restart 1 of 1")
    job.wait_for("got ok", 4)
    touch(tmp_path, "go")
    assert job.wait() == 0


SHOWS = "import os, sys; print('args', *sys.argv[1:]); print(os.environ['DDPLAUNCH_VLLM_ADDRESS'], flush=True)"


def test_placeholders_in_words_and_variables(begin, tmp_path):
    write_program(tmp_path, "shows.py", SHOWS)
    write_program(tmp_path, "waits.py", SHOWS + "\nimport time; time.sleep(1000)")
    words = ("{port}", "{port.weights}", "{vllm}", '{"backend": "nccl"}', "{x.y.z.a}", "{}", "{vllm.host}")
    env = ("--env", "URL=http://{address}/")
    command = ("--command", "--name", "vllm", "--ready", "none", *env, PYTHON, "waits.py", *words, ":")
    job = begin(*command, "--nproc", "1", *EXEC, "shows.py",
                "{vllm}", "{vllm.port}", "{vllm.port.weights}", "{prot}", "{vllm.host}")  # fmt: skip
    wait_until(lambda: job.stdout().count("\n") == 2 or job.process.poll() is not None, "the rank")
    job.signal(signal.SIGINT)
    job.wait()
    shown = re.search(r"args (\d+) (\d+) (\S+) (.*)", job.stderr())
    port, weights, address, rest = shown.groups()
    assert address == f"127.0.0.1:{port}"
    assert weights != port
    assert rest == '{"backend": "nccl"} {x.y.z.a} {} 127.0.0.1'
    assert job.stdout() == f"args 127.0.0.1:{port} {port} {weights} {{prot}} 127.0.0.1\n127.0.0.1:{port}\n"


@pytest.mark.ci
def test_what_is_no_sign_of_readiness(begin):
    """A redirect, and a server that accepts and never answers; a proxy is not asked."""
    for how in ("moved", "mute"):
        job = begin(*server(how, options=("--ready-timeout", "0.7")), *RANKS)
        assert job.wait() == 124
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    job = begin(*server(), *MAIN[:4], "main", "true", ":", "--nproc", "1", "--no-python", "true", env=proxies)
    assert job.wait() == 0


@pytest.mark.parametrize("ready", ["line:listening", "tcp", "file:ready"])
def test_other_signs_of_readiness(begin, tmp_path, ready):
    script = f"touch ready; exec {PYTHON} {PROGRAMS / 'server.py'} {{port}}"
    job = begin("--command", "--name", "vllm", "--ready", ready, "sh", "-c", script, ":", "--nproc", "1", *EXEC,
                "--no-python", "true")  # fmt: skip
    assert job.wait() == 0
    assert "vllm is ready" in job.stderr()


@pytest.mark.ci
def test_a_server_without_so_reuseaddr_needs_a_port_that_is_not_held(begin):
    job = begin(*server("plain"), *RANKS, "once")
    assert job.wait() == 1
    assert "before it was ready (its port is held for it: try --no-hold, or hold = false): " in job.stderr()
    assert "Address already in use" in job.stderr()
    job = begin(*server("plain", options=("--no-hold",)), *RANKS, "once")
    assert job.wait() == 0


@pytest.mark.ci
def test_a_fixed_port(begin, run_ddplaunch):
    port = free_port()
    command = (
        "--command",
        "--name",
        "vllm",
        "--ready",
        f"http:{port}/health",
        PYTHON,
        PROGRAMS / "server.py",
        port,
        ":",
    )
    job = begin(*command, *RANKS, "once")
    assert job.wait() == 0
    assert f"got ok from http://127.0.0.1:{port}/x" in job.stdout()
    with socket.create_server(("127.0.0.1", port)):
        done = run_ddplaunch("run", *command, *RANKS)
    assert done.returncode == 2
    assert re.search(rf"port {port} of vllm is in use by .* \(pid {os.getpid()}, \w+\)", done.stderr)


@pytest.mark.ci
def test_no_port_of_several_jobs_collides(begin):
    """Twelve at once; each server must listen on the port that it was given."""
    jobs = [begin(*server(), "--nproc", "1", *EXEC, CLIENT, URL, "once") for _ in range(12)]
    assert [job.wait() for job in jobs] == [0] * 12
    ports = [re.search(r"vllm: port (\d+)", job.stderr())[1] for job in jobs]
    assert len(set(ports)) == 12


@pytest.mark.ci
def test_a_program_has_no_variables_of_ranks(begin):
    inherited = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    job = begin(*server(), "--cluster", "none", *RANKS, "once", env=inherited)
    assert job.wait() == 0, job.stderr()
    assert re.search(r"\[vllm\] server \d+$", job.stderr(), re.MULTILINE)


def test_gpus_are_divided(begin, fake_nvml, tmp_path):
    """A command sees numbers, one without GPUs none; the ranks get the rest."""
    write_program(
        tmp_path,
        "gpus.py",
        "import os\nprint(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'], flush=True)",
    )
    env = fake_nvml.environ(8)
    shows = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES.; exec sleep 1000", ":")
    four = ("--command", "--name", "vllm", "--gpus-per-node", "4", *shows)
    one, none = ("--command", "--name", "eval", "--gpus", "6-7", *shows), ("--command", "--name", "cpu", *shows)
    job = begin(*one, *four, *none, *EXEC, "gpus.py", env=env)
    assert job.wait() == 0
    for line in ("[vllm] 0,1,2,3.", "[eval] 6,7.", "[cpu] .", "ddplaunch: vllm: GPUs 0-3", "ddplaunch: eval: GPUs 6-7"):
        assert f"{line}\n" in job.stderr()
    assert sorted(job.stdout().split()) == sorted(["[0]", "0", "4,5", "[1]", "1", "4,5"])


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (("--gpus-per-node", "6"), ("--gpus-per-node", "4"), "vllm wants 6 GPUs, eval 4, and 8 are visible"),
        (("--gpus", "0-3"), ("--gpus", "3,4"), "GPU 3 is given to vllm, eval\n  vllm  0-3\n  eval  3-4"),
        (("--gpus-per-node", "6"), ("--gpus", "6,7"), "so train.py gets none of 8 GPUs"),
        (("--gpus", "9"), (), "--gpus 9: this machine has 8 GPUs, 0 to 7"),
    ],
)
def test_gpus_that_cannot_be_divided(run_in_fork, fake_nvml, tmp_path, first, second, expected):
    write_program(tmp_path, "train.py", "")
    parts = ("--command", "--name", "vllm", *first, "sleep", "9", ":")
    parts += ("--command", "--name", "eval", *second, "sleep", "9", ":") if second else ()
    done = run_in_fork("run", *parts, "train.py", env=fake_nvml.environ(8))
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--command : train.py", ("--command needs a program", "ddplaunch run --command vllm")),
        (": train.py", ('a program is missing beside ":"', "")),
        ("train.py :", ('a program is missing beside ":"', "")),
        ("--command sleep 9 : --command sleep 9 : train.py", ("two programs are named sleep", "--name NAME")),
        ("train.py : train.py", ("2 parts have a target", "--command")),
        ("--command sleep 9", ("no part has a target", "--command")),
        ("--command --redy tcp sleep 9 : train.py", ("--redy", "did you mean --ready?")),
        ("--command --nproc 2 sleep 9 : train.py", ("--nproc does not work with --command", "in the part with")),
        ("--command nosuch : train.py", ("program nosuch not found", "name one on PATH")),
        ("--command --kind servce sleep 9 : train.py", ("--kind servce: expected main, service", "mean service?")),
        (
            "--command --after slep sleep 9 : --command --name slip sleep 9 : train.py",
            ('no program named "slep"', ""),
        ),
        ("--command sleep {prot} : train.py", ('{prot}: no program named "prot"', "did you mean {port}?")),
        ("--command sleep 9 : train.py {sleep}", ("{sleep}: sleep has no such port", "write {port} in the command")),
        ("--command --ready tcp sleep 9 : train.py", ("ready tcp needs its port", "write {port}")),
        ("--command --ready http sleep 9 : train.py", ("--ready http: expected http:/PATH", "")),
        ("--command --ready-timeout x sleep 9 : train.py", ("--ready-timeout x: expected a time", "")),
        ("--command --env X sleep 9 : train.py", ("--env X: expected NAME=VALUE", "--env X=VALUE")),
        ("--command --name port sleep 9 : train.py", ("--name port: the name is taken", "")),
        ("--command --name a-b sleep 9 : --command --name a_b sleep 9 : train.py", ("DDPLAUNCH_A_B_ADDRESS", "")),
        (
            "--command --name a --after b sleep 9 : --command --name b --after a sleep 9 : train.py",
            ("a, b come after each other", ""),
        ),
        ("--command --cwd nowhere sleep 9 : train.py", ("the folder nowhere does not exist", "")),
        ("--program {} train.py", ("--program: not a program", "write `:` between programs")),
    ],
)
def test_refusals(run_in_fork, tmp_path, line, expected):
    write_program(tmp_path, "train.py", "open('started', 'w').close()")
    done = run_in_fork("run", *line.split())
    assert (done.returncode, done.stdout) == (2, ""), done
    assert len(done.stderr.splitlines()) <= 3
    for part in expected:
        assert part in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_colon_behind_two_dashes_is_the_programs(begin, tmp_path):
    write_program(tmp_path, "shows.py", "import sys; print(*sys.argv[1:])")
    job = begin("--nproc", "1", *EXEC, "shows.py", "--", "a", ":", "b")
    assert job.wait() == 0
    assert job.stdout() == "a : b\n"


def test_cwd_nice_and_a_dry_run(begin, run_in_fork, tmp_path):
    (tmp_path / "inner").mkdir()
    options = ("--command", "--name", "eval", "--cwd", "inner", "--nice", "7", "--kind", "sidecar")
    command = (*options, "sh", "-c", "echo $(basename $PWD) $(nice); exec sleep 1000", ":")
    shown = run_in_fork("run", *command, "--dry-run", "--nproc", "1", "--no-python", "true")
    (row,) = (line for line in shown.stdout.splitlines() if line.startswith("program "))
    assert row.startswith("program eval  sidecar  node 0  GPUs -  ready -  after -  sh -c 'echo $(basename $PWD)")
    waits = "while ! test -e go; do sleep 0.02; done"
    job = begin(*command, "--nproc", "1", "--no-python", "sh", "-c", waits)
    wait_for_note(job, f"[eval] inner {os.nice(0) + 7}")
    touch(tmp_path, "go")
    assert job.wait() == 0


# ----------------------------------------------------------------------------------------- restarts and copies

BREAKS = """
import os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

subprocess.Popen(["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), BaseHTTPRequestHandler)
print("env", os.getpid(), "listens", flush=True)
while not os.path.exists("break"):
    time.sleep(0.02)
os.unlink("break")
sys.exit(3)
"""


@pytest.mark.ci
def test_a_program_starts_again_alone_at_the_same_address(begin, tmp_path):
    """What it has left is killed; the ranks and the other server run on."""
    write_program(tmp_path, "breaks.py", BREAKS)
    env = ("--command", "--name", "env", "--restarts", "1", PYTHON, "breaks.py", "{port}", ":")
    job = begin(*env, *server(), *RANKS)
    job.wait_for("got ok", 2)
    assert len(job.find("sleep 1000")) >= 2
    touch(tmp_path, "break")
    wait_for_note(job, "env exited with code 3: starting it again in 10 s (restart 1 of 1)")
    wait_until(lambda: not job.find("sleep 1000"), "the end of what it has left", 5)
    wait_until(lambda: job.stderr().count("env is ready at") == 2, "the restart")
    addresses = re.findall(r"env is ready at (\S+)", job.stderr())
    assert addresses[0] == addresses[1]
    touch(tmp_path, "break")
    assert job.wait() == 3
    assert "env exited with code 3 before client.py was done, after 1 restart (exit code 3)" in job.stderr()
    assert job.stdout().count("got ok") == 2


def test_copies_of_a_program_and_lists_of_their_addresses(begin, tmp_path):
    write_program(
        tmp_path, "lists.py", "import os, sys\nprint(*sys.argv[1:], os.environ['DDPLAUNCH_WORKER_ADDRESSES'])"
    )
    worker = server(name="worker", options=("--count", "3"))
    job = begin(*worker, "--nproc", "1", *EXEC, "lists.py", "{worker.all}", "{worker.all:http://%/v1}", "{worker}")
    assert job.wait() == 0
    everyone, urls, first, variable = job.stdout().split()
    addresses = [re.search(rf"worker\.{index} is ready at (\S+)", job.stderr())[1] for index in range(3)]
    assert len({*addresses}) == 3
    assert everyone == variable == ",".join(addresses)
    assert urls == ",".join(f"http://{each}/v1" for each in addresses)
    assert first == addresses[0]
    for index in range(3):
        assert f"[worker.{index}] asked to end" in job.stderr()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--command --count 0 sleep 9 : train.py", ("--count 0: expected a number from 1 to 256", "")),
        ("--command --restarts x sleep 9 : train.py", ("--restarts x: expected a number from 0", "")),
        ("--command --with infr sleep 9 : --command --name infer sleep 9 : train.py", ("infr", "did you mean infer?")),
        ("--command --each-node --nodes 2 sleep 9 : train.py", ("nodes, with and each-node contradict", "one of them")),
        (
            "--command --count 2 --ready tcp:8000 sleep 9 : train.py",
            ("--count of sleep 2: they cannot all have port 8000", "write {port}"),
        ),
        ("--command --name a {b.all} : --command --name b sleep 9 : train.py", ("{b.all}: b has no such port", "")),
    ],
)
def test_refusals_of_copies_and_restarts(run_in_fork, tmp_path, line, expected):
    write_program(tmp_path, "train.py", "open('started', 'w').close()")
    done = run_in_fork("run", *line.split())
    assert (done.returncode, done.stdout) == (2, ""), done
    for part in expected:
        assert part in done.stderr
    assert not (tmp_path / "started").exists()


ELASTIC = (
    "--nnodes", "1:2", "--node-rank", "auto", "--join-window", "0.5", "--master-addr", "127.0.0.1", "--master-port",
    "PORT",
)  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ("--check",),
        ("--timeout", "5m"),
        ("--notify", "cat >> notes"),
        ("--max-restarts", "1"),
        ("--log-json",),
        ("--ui",),
        ("--stdin", "0"),
        ELASTIC,
        ("--warm",),
    ],
    ids=lambda options: options[0],
)
def test_options_of_the_job_work_with_programs(begin, run_ddplaunch, options):
    """The ranks wait for the server with each, and nothing is left."""
    modes = () if options[0] == "--warm" else EXEC
    words = [each.replace("PORT", str(free_port())) for each in options]
    job = begin(*server("late=0.2"), "--nproc", "2", *words, *modes, CLIENT, URL, "once")
    try:
        assert job.wait() == 0, job.stderr()
        assert job.stdout().count("got ok") == 2
        assert "vllm is ready at" in job.stderr()
    finally:
        if options[0] == "--warm":
            assert run_ddplaunch("warm", "--stop").returncode == 0


def test_a_module_beside_a_command_behind_a_wrapper(begin, tmp_path):
    """As `uv run` does, the wrapper waits for the server and passes SIGTERM on."""
    write_program(tmp_path, "ask.py", "import runpy, sys\nrunpy.run_path(sys.argv.pop(1), run_name='__main__')\n")
    wrapper = "import signal, subprocess, sys; p = subprocess.Popen(sys.argv[1:]); " \
        "signal.signal(signal.SIGTERM, lambda *_: p.terminate()); sys.exit(p.wait())"  # fmt: skip
    first = ("--command", "--name", "vllm", "--ready", "http:/health", PYTHON, "-c", wrapper)
    command = (*first, PYTHON, PROGRAMS / "server.py", "{port}", ":")
    job = begin(*command, "--nproc", "2", *EXEC, "-m", "ask", CLIENT, URL, "once")
    assert job.wait() == 0, job.stderr()
    assert job.stdout().count("got ok") == 2
    assert "[vllm] asked to end" in job.stderr()


def test_the_log_of_a_server_that_prints_much_is_complete(begin, tmp_path):
    """50,000 lines as fast as it can; no line is lost or torn."""
    text = "for number in range(50_000): print('line', number)\nprint('up', flush=True)\nimport time; time.sleep(1000)"
    command = ("--command", "--name", "vllm", "--ready", "line:up", PYTHON, "-c", text, ":")
    job = begin(*command, "--log-dir", "logs", "--nproc", "2", "--no-python", "true")
    assert job.wait() == 0
    (log,) = (tmp_path / "logs").glob("**/vllm.log")
    assert log.read_text().splitlines() == [*(f"line {number}" for number in range(50_000)), "up"]
