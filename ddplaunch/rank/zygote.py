"""The process between the supervisor and the ranks: imports torch once, forks every rank, outlives a dead supervisor.

Run from its path, as ``python zygote.py FD CONFIG``; ``rank/messages.py`` has what is said on the socket FD. When
the supervisor's end of it closes, however it died, everything below is killed and every temporary path removed.

It must stay single-threaded, compute nothing (libgomp hangs in a fork of a process that has used it) and never touch a
GPU. It adopts orphans, so whatever a rank leaves behind stays within reach.
"""

from __future__ import annotations

import sys

INITIAL_MODULES = frozenset(sys.modules)  # what any interpreter has at its start
if not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)  # this file's folder, which no import of the user's may see

import errno  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402

gc.disable()  # no collection while a million long-lived objects are made; and their pages stay shared

import json  # noqa: E402
import marshal  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402

FORWARDED_SIGNALS = frozenset(
    {
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGXCPU),
        *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()),
    }
)
"""As ``control.relay`` has them."""

STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
IGNORED_SIGNALS = (*STOPPING, *FORWARDED_SIGNALS)
"""What is for the supervisor to hear, not for us, where somebody tells a whole tree of processes (systemd, Slurm with
proctrack/linuxproc): the ranks would die with us, in the midst of their grace. It learns of each, as ranks have it."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from ddplaunch.rank import channel, leftovers, preloading, processes, repairs, store, titles, warm, worker
    from ddplaunch.rank.guard import ImportAuditor
    from ddplaunch.rank.messages import FromZygote, PythonJob, RankJob, ReadyMessage, SpawnRequest, Usage, ZygoteConfig
else:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("worker", os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py"))
    worker = module_from_spec(
        spec
    )  # as ``worker.load_private_module`` loads the others, leaving no name in sys.modules
    spec.loader.exec_module(worker)
    channel, leftovers, preloading = map(worker.load_private_module, ("channel", "leftovers", "preloading"))
    processes, repairs, store, titles = map(worker.load_private_module, ("processes", "repairs", "store", "titles"))

_HELPER_TIMEOUT_S = 3.0  # seconds more that multiprocessing's own helpers have for their end


def main() -> tuple[PythonJob, dict[str, int]]:
    """Serve until the supervisor goes; return only in a fork, which is to be a rank, with its job and descriptors."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    config: ZygoteConfig = json.loads(sys.argv[2])
    for number in config["shielded"]:  # Slurm sends its warning to every process of a step (docs/preemption.md)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, config["shielded"])
    kept = _become_warm(config, control) if config["warm"] else None
    if kept is None:
        # While torch loads nobody listens to the socket, so the kernel watches the supervisor; later we clean up.
        processes.die_with_parent(signal.SIGKILL)
        if os.getppid() != config["supervisor"]:
            os._exit(1)
    processes.adopt_orphans()
    began = time.monotonic()
    left = leftovers.AtexitCleanup()
    environ, guards = dict(os.environ), list["ImportAuditor"]()

    def watch() -> ImportAuditor:
        guards.append(
            worker.load_private_module("guard").Guard(config, INITIAL_MODULES, repairs, processes.list_children)
        )
        return guards[0]

    with kept.origins if kept else left, left:
        refused, failed = preloading.run_preload(config, watch)
    if refused:
        left.run()
        channel.send_message(control, {"op": "refused", "message": refused})
        os._exit(0)
    unsafe = preloading.why_not_forkable(config, failed, _find_shadowed(config["first"], *config["folders"]))
    if unsafe:
        for guard in guards:
            guard.restore(environ)
    gc.freeze()
    if kept:
        control, config = kept.serve(not unsafe, _find_shadowed, left)  # a fork returns, for each run
        left.is_shared = True
        if kept.runs_served:
            began = time.monotonic()
    if unsafe:
        _exec_fresh(control, config, unsafe, left)
    ready: ReadyMessage = {
        "op": "ready",
        "forks": config["forks"],
        "failed": config["failed"],
        "unsafe": config["unsafe"],
        "seconds": time.monotonic() - began,
        "stores": config["forks"] and store.available(),
        "pid": os.getpid(),
    }
    pidfd = processes.open_pidfd(os.getpid()) if config["guarded"] else None
    try:
        channel.send_message(control, ready, [] if pidfd is None else [pidfd])
    except OSError:  # nobody is there to hear it
        os._exit(1)
    if pidfd is not None:
        os.close(pidfd)
    if not config["guarded"]:
        processes.die_with_parent(0)
    return Zygote(control, config, left).run()


def _exec_fresh(control: socket.socket, config: ZygoteConfig, unsafe: str, left: leftovers.AtexitCleanup) -> NoReturn:
    """Become an empty interpreter, which imports less or execs every rank: the same process, the same socket."""
    fresh: ZygoteConfig = {**config, "modules": config["fallback"], "fallback": [], "failed": unsafe}
    if not config["fallback"]:
        fresh = {**fresh, "forks": False, "failed": config["failed"], "unsafe": unsafe}
    control.set_inheritable(True)
    left.run()
    words = [sys.executable, __file__, str(control.fileno()), json.dumps(fresh), *sys.argv[3:]]
    os.execv(sys.executable, words)


def _become_warm(config: ZygoteConfig, first: socket.socket) -> warm.WarmZygoteServer:
    """Become one that stays for other runs; the first one's order is in ``first``."""
    module = worker.load_private_module("warm")
    module.use(worker.load_private_module)
    processes.set_process_title("ddplaunch: warm zygote")
    kept: warm.WarmZygoteServer = module.Warm(config, config["warm"], first, IGNORED_SIGNALS, worker)
    return kept


def _find_shadowed(*folders: str) -> str | None:
    """Name what ``import`` would have found in the user's folders, had we not loaded another module of that name."""
    for folder in folders:
        for name in sorted(worker.list_importable(folder)):
            loaded = sys.modules.get(name)
            if loaded is not None and name not in INITIAL_MODULES and not worker.is_loaded_from(loaded, folder):
                return os.path.join(folder, name)
    return None


class Zygote:
    def __init__(self, control: socket.socket, config: ZygoteConfig, left: leftovers.AtexitCleanup) -> None:
        self.control, self.config, self.left = control, config, left
        self.ranks: dict[int, int] = {}  # pid to rank, of those that run
        self.store: int | None = None  # the pid of the process that holds the job's store
        self.lacking = 0  # why there is none, where one was wanted: an errno
        self.woken, self.wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(self.wake, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        self.poll = select.poll()
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(self.woken, select.POLLIN)
        self.inherited = {
            number: signal.signal(number, signal.SIG_IGN) for number in IGNORED_SIGNALS
        }  # forgets what came by now
        ignored = config["ignores_children"]
        self.inherited[signal.SIGCHLD] = signal.SIG_IGN if ignored else signal.getsignal(signal.SIGCHLD)
        for number in self.inherited:
            signal.signal(number, _on_signal_noop)
        # Read together with their senders: a rank that sends one to its parent wants the job to end.
        self.stopping = processes.open_signalfd(STOPPING)
        if self.stopping is not None:
            self.poll.register(self.stopping, select.POLLIN)
        read = () if self.stopping is None else STOPPING
        signal.pthread_sigmask(signal.SIG_BLOCK, read)
        unblocked = {*IGNORED_SIGNALS}.difference(read)  # a warm zygote forks us with all blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)

    def run(self) -> tuple[PythonJob, dict[str, int]]:
        if os.getppid() != self.config["supervisor"]:
            self.exit()
        while True:
            ready = {fd for fd, _ in self.poll.poll()}
            if not ready.isdisjoint((self.woken, self.stopping)):
                self.reap()
            if self.control.fileno() in ready:
                try:
                    request, fds = channel.receive_message(self.control)
                except (EOFError, OSError):
                    self.exit()
                if request["op"] == "spawn":
                    if born := self.fork_rank(request, fds):
                        return born
                elif request["op"] == "store":
                    self.serve_store(fds)
                elif request["op"] == "sweep":
                    self.sweep(request["grace"], request["patience"])
                elif request["op"] == "remove":
                    self.config["remove"].append(request["path"])

    def send(self, message: FromZygote, fds: Sequence[int] = ()) -> None:
        try:
            channel.send_message(self.control, message, fds)
        except OSError as error:
            if not fds or error.errno in (errno.EPIPE, errno.ECONNRESET):
                self.exit()
            self.send(message)  # the kernel takes no more descriptors, and the supervisor can do without this one

    def reap(self) -> None:
        try:
            came = os.read(self.woken, 4096)
        except BlockingIOError:
            came = b""
        sent = [(number, 0) for number in came if number in IGNORED_SIGNALS]
        for number, sender in sent + (processes.read_signalfd(self.stopping) if self.stopping is not None else []):
            self.send({"op": "signalled", "number": number, "rank": self.rank_of(sender)})
        self.send_exits(processes.reap_children())

    def rank_of(self, pid: int) -> int | None:
        """The rank that a process is, or that leads its session; None for others."""
        try:
            return self.ranks.get(pid, self.ranks.get(os.getsid(pid))) if pid else None
        except OSError:
            return None

    def send_exits(self, ended: list[tuple[int, int, Usage]]) -> None:
        for pid, status, usage in ended:
            if pid in self.ranks:
                rank = self.ranks.pop(pid)
                self.send({"op": "exited", "rank": rank, "pid": pid, "status": status, "usage": usage})
            elif pid == self.store:
                self.store = None
                self.send({"op": "store exited", "pid": pid, "status": status})

    def serve_store(self, fds: list[int]) -> None:
        """Fork the process that holds the store of an attempt; the one before ends, with all that it had.

        Ranks may connect before it serves: they wait in the queue of the socket.
        """
        if self.store is not None:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
        parent, self.store, self.lacking = os.getpid(), None, errno.EMFILE
        if fds:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
            try:
                self.store, self.lacking = os.fork(), 0
            except OSError as error:
                self.lacking = error.errno or errno.EAGAIN
            if self.store == 0:
                self.become_store(fds[0], parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for fd in fds:
            os.close(fd)

    def become_store(self, listening: int, parent: int) -> NoReturn:
        """In the fork: hold the store until we are killed, whatever signal comes to all processes of the job."""
        try:
            processes.set_process_title("ddplaunch: store of a run")
            signal.set_wakeup_fd(-1)
            for number in IGNORED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            os.setsid()
            processes.die_with_parent(signal.SIGKILL)
            if os.getppid() == parent:
                self.control.close()
                for fd in filter(None, (self.woken, self.wake, self.stopping)):
                    os.close(fd)
                store.serve(listening)
        except BaseException as error:
            os.write(2, f"ddplaunch: the store could not start: {error}\n".encode())
        os._exit(1)

    def is_store(self, pid: int) -> bool:
        """Whether it is the process of the store, which ranks of other nodes may need when all here have ended."""
        return pid == self.store

    def fork_rank(self, request: SpawnRequest, fds: list[int]) -> tuple[PythonJob, dict[str, int]] | None:
        """Fork a rank; returns None here, and in the fork, if it is to go on as the user's program, what it needs."""
        parent = os.getpid()
        pid: int | None = None
        number = self.lacking or errno.EMFILE  # which some descriptors did not survive, if some are missing
        if len(fds) == len(request["fds"]) and not self.lacking:
            # What is sent to the fork waits until that has its handlers.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
            try:
                pid = os.fork()
            except OSError as error:  # a limit on processes or memory
                number = error.errno or errno.EAGAIN
            if pid == 0:
                return self.setup_child(request["job"], dict(zip(request["fds"], fds, strict=True)), parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for fd in fds:
            os.close(fd)
        if pid is None:
            self.send({"op": "unborn", "rank": request["rank"], "errno": number})
            return None
        self.ranks[pid] = request["rank"]
        pidfd = processes.open_pidfd(pid)
        self.send({"op": "spawned", "rank": request["rank"], "pid": pid}, [] if pidfd is None else [pidfd])
        if pidfd is not None:
            os.close(pidfd)
        return None

    def setup_child(self, job: RankJob, fds: dict[str, int], parent: int) -> tuple[PythonJob, dict[str, int]]:
        """In the fork: leave nothing of the zygote but its modules."""
        try:
            signal.set_wakeup_fd(-1)
            for inherited, handler in self.inherited.items():
                if inherited in FORWARDED_SIGNALS:
                    signal.signal(inherited, signal.SIG_IGN)  # forgets one that came by now: it was for a handler
                signal.signal(inherited, handler or signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.config["blocked"])
            os.setsid()
            processes.die_with_parent(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            self.control.close()
            for fd in filter(None, (self.woken, self.wake, self.stopping)):
                os.close(fd)
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                if name in fds:
                    fd = fds.pop(name)
                    os.dup2(fd, number)
                    if fd > 2:
                        os.close(fd)
            if job["cpus"]:
                os.sched_setaffinity(0, job["cpus"])
            if job["kind"] == "program" or not self.config["forks"]:
                self.exec_child(job, fds)
            self.left.disable_in_rank()
            os.environ.update(job["env"])
            repairs.apply_fixups()
            processes.set_process_title(job["title"])
            titles.Titles(job["title"], processes.set_process_title).install()
            gc.enable()
        except BaseException as error:
            os.write(2, f"ddplaunch: rank {job['rank']} could not start: {error}\n".encode())
            os._exit(1)
        return job, fds

    def exec_child(self, job: RankJob, fds: dict[str, int]) -> NoReturn:
        """In the fork: become a fresh interpreter, or the program of ``--no-python``."""
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and exec would hand on
            signal.signal(number, signal.SIG_DFL)
        if job["kind"] == "program":
            # As a shell would, which is what $0 of a script shows.
            path = job["typed"] if os.sep in job["typed"] else job["path"]
            words = [job["typed"], *job["args"]]
        else:
            handed = os.memfd_create("job", 0) if hasattr(os, "memfd_create") else _make_memfd()
            os.write(handed, marshal.dumps((job, fds)))  # type: ignore[arg-type]  # a TypedDict is a dict
            os.lseek(handed, 0, os.SEEK_SET)
            for fd in (handed, *fds.values()):
                os.set_inheritable(fd, True)
            path, words = sys.executable, [sys.executable, worker.__file__, str(handed), job["typed"], *job["args"]]
        try:
            os.execve(path, words, {**os.environ, **job["env"]})
        except OSError as error:
            shown = job["typed"] if job["kind"] == "program" else path
            os.write(2, f"ddplaunch: cannot execute {shown}: {error.strerror}\n".encode())
            os._exit(126)

    def sweep(self, grace: float, helper_timeout_s: float) -> None:
        """End all that is left below: SIGTERM, then SIGKILL after ``grace`` seconds or as soon as we hear anything.

        What multiprocessing keeps beside a program (forkserver, resource tracker) leaves by itself, and is let to:
        so many seconds of ``helper_timeout_s`` come first, and _HELPER_TIMEOUT_S where only they are left, late as they may be
        on a busy machine.
        """
        if min(grace, helper_timeout_s) > 0:
            self.wait(min(grace, helper_timeout_s))
            if all(processes.is_multiprocessing_helper(pid) for pid in self.below()):
                self.wait(min(grace, _HELPER_TIMEOUT_S))
        left = self.below()
        found = [processes.describe_process(pid) for pid in left if pid not in self.ranks]
        if left and grace > 0:
            for pid in left:
                processes.send_signal(pid, signal.SIGTERM)
                processes.send_signal(pid, signal.SIGCONT)
            self.wait(grace)
        stuck, ended = processes.kill_descendants(os.getpid(), is_excluded=self.is_store)
        self.send_exits(ended)
        self.send({"op": "swept", "found": found, "stuck": stuck})

    def below(self) -> list[int]:
        return processes.list_descendants(os.getpid(), is_excluded=self.is_store)

    def wait(self, seconds: float) -> None:
        """Wait until nothing is left below or the supervisor has something to say, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and self.below():
            if self.control.fileno() in {fd for fd, _ in self.poll.poll(left * 1000)}:
                return
            self.reap()

    def exit(self) -> NoReturn:
        """The supervisor is gone: so is everything that it started, and every file that only this job needed."""
        processes.kill_descendants(os.getpid())
        for path in self.config["remove"]:
            _remove(path)
        self.left.run()
        os._exit(0)


def _on_signal_noop(number: int, frame: object) -> None:
    """Hear a signal, for the pipe that wakes us."""


def _make_memfd() -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # a folder, or nothing
        import shutil

        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    life = worker.RankRunner(*worker.preallocate_stack_chunk(main)(), forked=True)
    worker.preallocate_stack_chunk(worker.run_program)(life)
    life.exit()
