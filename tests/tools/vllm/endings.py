"""The ways in which a job with a vLLM server ends, and what is left of it afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import BackgroundJob, is_alive, wait_until
from tests.scaled_timeouts import scaled_timeout

PROGRAMS = Path(__file__).parent / "programs"
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", str(64 << 20))
OPTIONS = ("--nproc", "2", "--run-id", "vllm")
READY = re.compile(r"vllm is ready at \S+:(\d+) after (\S+) s")
END_S, LEFT_S = 60.0, 5.0


class Job(BackgroundJob):
    """A vLLM server beside two ranks that ask it."""

    def __init__(self, programs: Path, model: Path, folder: Path) -> None:
        server = ("--command", "--ready", "http:/health", programs / "vllm", "serve", model, "--port", "{port}", *FLAGS)
        trainer = (PROGRAMS / "trainer.py", "http://{vllm}", model)
        state = {"XDG_STATE_HOME": str(folder / "state"), "VLLM_NO_USAGE_STATS": "1"}
        super().__init__(folder, ("run", *server, ":", *OPTIONS, *trainer), state)
        self.folder = folder

    def server(self) -> int:
        """The pid of the server itself, which has the engine as a child."""
        return min({*self.find("vllm serve")} - {self.process.pid})

    def engine(self) -> int:
        return self._find_below("VLLM::EngineCore")

    def worker(self) -> int:
        return self._find_below("VLLM::Worker")

    def _find_below(self, title: str) -> int:
        below: list[psutil.Process] = psutil.Process(self.server()).children(recursive=True)
        (found,) = (each for each in below if each.cmdline()[:1] == [title])
        return int(found.pid)

    def wait_until_trains(self) -> None:
        self.wait_for("step 0:", 2, timeout=120)

    def wait_until_loads(self) -> None:
        """Wait until the engine is started, and not ready yet."""
        wait_until(lambda: "(EngineCore pid" in self.stdout() + self.stderr(), "the engine", 120)
        assert not READY.search(self.stderr()), self.stderr()


def _signal(whose: Callable[[Job], int], number: int) -> Callable[[Job], None]:
    return lambda job: os.kill(whose(job), number)


def _touch(name: str) -> Callable[[Job], None]:
    return lambda job: (job.folder / name).touch()


def _launcher(job: Job) -> int:
    return job.process.pid


def _rank(job: Job) -> int:
    return job.ranks()[-1]


def _last_child(job: Job) -> int:
    """The engine before it has its title."""
    return max(int(each.pid) for each in psutil.Process(job.server()).children())


@dataclass(frozen=True)
class Ending:
    """What is done to a job, and how it must end.

    Attributes:
        code: the launcher's exit code, as ``subprocess`` has it; None is any but 0.
        text: a regular expression that its stderr must match.
    """

    name: str
    act: Callable[[Job], None]
    code: int | None
    text: str = ""
    while_loading: bool = False


BEFORE_THE_END, BEFORE_READY = r"vllm .* before trainer.py was done", r"vllm .* before it was ready"

ENDINGS = (
    Ending("the ranks are done", _touch("go"), 0),
    Ending("the server is asked to end", _signal(Job.server, signal.SIGTERM), 1, BEFORE_THE_END),
    Ending("the server is killed", _signal(Job.server, signal.SIGKILL), 137, BEFORE_THE_END),
    Ending("its engine is killed", _signal(Job.engine, signal.SIGKILL), None, BEFORE_THE_END),
    Ending("its worker is killed", _signal(Job.worker, signal.SIGKILL), None, BEFORE_THE_END),
    Ending("a rank fails", _touch("fail"), 5, r"rank 1 .*exit(ed with)? code 5"),
    Ending("a rank is killed", _signal(_rank, signal.SIGKILL), 137, r"rank \d .*SIGKILL"),
    Ending("Ctrl-C", _signal(_launcher, signal.SIGINT), 130),
    Ending("SIGTERM of the launcher", _signal(_launcher, signal.SIGTERM), 143),
    Ending("kill -9 of the launcher", _signal(_launcher, signal.SIGKILL), -9),
    Ending("Ctrl-C while it loads", _signal(_launcher, signal.SIGINT), 130, while_loading=True),
    Ending(
        "its engine is killed as it loads",
        _signal(_last_child, signal.SIGKILL),
        None,
        BEFORE_READY,
        while_loading=True,
    ),
    Ending("kill -9 while it loads", _signal(_launcher, signal.SIGKILL), -9, while_loading=True),
)

HEAD = f"{'ending':36} {'code':>5} {'ready s':>8} {'vLLM MB':>8} {'ours MB':>8} {'end s':>6}  left"


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        server_mb: the memory of vLLM; ``own_mb``: of the launcher and its zygotes.
        end_s: from the deed until nothing was left, or the time was over.
    """

    ending: Ending
    code: int
    ready_s: str
    server_mb: int
    own_mb: int
    end_s: float
    left: Sequence[str]
    wrong: Sequence[str]

    def render(self) -> str:
        figures = f"{self.ready_s:>8} {self.server_mb:>8} {self.own_mb:>8} {self.end_s:>6.1f}"
        return f"{self.ending.name:36} {self.code:>5} {figures}  {', '.join((*self.left, *self.wrong)) or 'nothing'}"


def try_ending(ending: Ending, programs: Path, model: Path) -> Result:
    """Start a job, end it in this way, and list what is left of it."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        job = Job(programs, model, Path(folder))
        try:
            job.wait_until_loads() if ending.while_loading else job.wait_until_trains()
            return _end(ending, job)
        finally:
            job.process.kill()  # with which all others end, if it still runs
            job.process.wait()


def _end(ending: Ending, job: Job) -> Result:
    processes = [psutil.Process(job.process.pid), *psutil.Process(job.process.pid).children(recursive=True)]
    server = {job.server(), *(each.pid for each in psutil.Process(job.server()).children(recursive=True))}
    every = {each.pid for each in processes}
    shared, ports = _list_shared_memory(every), _list_ports(every)
    ranks = {*job.ranks()} if not ending.while_loading else set[int]()
    server_mb, own_mb = _measure_memory(server), _measure_memory(every - server - ranks)
    began = time.monotonic()
    ending.act(job)
    with suppress(subprocess.TimeoutExpired):
        job.process.wait(scaled_timeout(END_S))
    deadline = time.monotonic() + scaled_timeout(LEFT_S)
    while (left := _list_left(processes, shared, ports)) and time.monotonic() < deadline:
        time.sleep(0.05)
    end_s = time.monotonic() - began
    code, text = job.process.returncode, job.stderr()
    wrong = [] if code == ending.code or (ending.code is None and code) else [f"exit code {code}, not {ending.code}"]
    if not re.search(ending.text, text):
        said = "\n".join(line for line in text.splitlines() if line.startswith("ddplaunch: "))
        wrong.append(f"no {ending.text!r} in:\n{said}")
    ready = READY.search(text)
    return Result(ending, code, ready[2] if ready else "-", server_mb, own_mb, end_s, left, wrong)


def _list_left(processes: Sequence[psutil.Process], shared: set[str], ports: set[int]) -> list[str]:
    """List those of the processes that run, shared memory that exists, and ports that are listened on.

    A process is known by its pid and its start: vLLM writes its title over the environment.
    """
    left = [str(each.pid) for each in processes if each.is_running() and is_alive(each.pid)]
    left += [path for path in sorted(shared) if os.path.exists(path)]
    return left + [f"port {port}" for port in sorted(ports & _list_all_ports())]


def _list_shared_memory(pids: set[int]) -> set[str]:
    """List the files in /dev/shm that these processes have mapped."""
    found = set[str]()
    for pid in pids:
        with suppress(OSError):
            found |= {*re.findall(r"(/dev/shm/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE)}
    return found


def _list_ports(pids: set[int]) -> set[int]:
    found = set[int]()
    for pid in pids:
        with suppress(psutil.Error):
            found |= {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"}
    return found


def _list_all_ports() -> set[int]:
    return {each.laddr.port for each in psutil.net_connections("tcp") if each.status == "LISTEN"}


def _measure_memory(pids: set[int]) -> int:
    """Return the memory of these processes in MB, what they share with others in parts (PSS)."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            (found,) = re.findall(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += int(found)
    return total // 1000
