"""The zygote: a process between launcher and ranks that imports torch once, forks every rank, and cleans up.

Run by path, as ``python zygote.py FD CONFIG``; the messages on the socket FD are in ``zygote_messages.py``. When the
launcher's end of the socket closes, for whatever reason, all descendants are killed and all temporary paths removed.

It must stay single-threaded, compute nothing (libgomp hangs in a fork of a process that has used it) and never touch a
GPU. It is a subreaper, so it can find and kill the processes that a rank leaves behind.
"""

from __future__ import annotations

import sys

INITIAL_MODULES = frozenset(sys.modules)  # those of a fresh interpreter
if not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)  # this file's folder: imports of the user must not find its files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddplaunch.core.rank import import_recorder, rank_runner
else:
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import spec_from_file_location

    # As ``rank_runner.load_private_module`` loads the others: no name is left in sys.modules.
    spec = spec_from_file_location("rank_runner", __file__.removesuffix("zygote.py") + "rank_runner.py")
    rank_runner = module_from_spec(spec)
    spec.loader.exec_module(rank_runner)
    import_recorder = rank_runner.load_private_module("core/rank/import_recorder")

recorder = import_recorder.ImportRecorder(INITIAL_MODULES)  # before this file's own imports, which ranks must not see

import errno  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402

gc.disable()  # no collection while the imports create a million long-lived objects; and their pages stay shared

import json  # noqa: E402
import marshal  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from ddplaunch.core.rank import (
        atexit_cleanup,
        hidden_modules,
        preload_runner,
        process_titles,
        store_process,
        zygote_channel,
    )
    from ddplaunch.core.rank.zygote_messages import (
        Auditor,
        ForkFixups,
        FromZygote,
        PythonJob,
        RankJob,
        ReadyMessage,
        ServerConfig,
        SpawnRequest,
        ZygoteConfig,
        ZygoteServer,
    )
    from ddplaunch.system.processes import proc_utils
    from ddplaunch.system.processes.proc_utils import Usage

    RankStart = tuple[PythonJob, dict[str, int], hidden_modules.HiddenModules | None]
    """The job of a rank, its descriptors by purpose, and the modules that were preloaded for it."""
else:
    atexit_cleanup = rank_runner.load_private_module("core/rank/atexit_cleanup")
    hidden_modules = rank_runner.load_private_module("core/rank/hidden_modules")
    preload_runner = rank_runner.load_private_module("core/rank/preload_runner")
    proc_utils = rank_runner.load_private_module("system/processes/proc_utils")
    process_titles = rank_runner.load_private_module("core/rank/process_titles")
    store_process = rank_runner.load_private_module("core/rank/store_process")
    zygote_channel = rank_runner.load_private_module("core/rank/zygote_channel")

STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
IGNORED_SIGNALS = (*STOPPING, *proc_utils.FORWARDED_SIGNALS)
"""Signals that the launcher handles. systemd, or Slurm with proctrack/linuxproc, may send them to the whole process
tree. The zygote survives them, as otherwise the ranks would die with it during their grace, and reports them."""

_HELPER_TIMEOUT_S = 3.0  # additional time for multiprocessing's helper processes to end by themselves


def main() -> RankStart:
    """Serve the launcher until it closes the socket; return only in a fork that becomes a rank."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    config: ZygoteConfig = json.loads(sys.argv[2])
    shielded = config["shielded_signals"]  # Slurm sends its warning to all processes of a step (docs/preemption.md)
    for number in shielded:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, shielded)
    server = _make_server(config["server"], config, control) if config["server"] else None
    if server is None:
        # During the imports the socket is not read, so the kernel watches the launcher; later the zygote cleans up.
        proc_utils.die_with_parent(signal.SIGKILL)
        if os.getppid() != config["parent_pid"]:
            os._exit(1)
    proc_utils.adopt_orphans()
    began = time.monotonic()
    cleanup = atexit_cleanup.AtexitCleanup()
    fork_fixups = rank_runner.load_private_module(config["fork_fixups"]) if config["fork_fixups"] else None
    environ, auditors = dict(os.environ), list["Auditor"]()
    if fork_fixups is not None:
        recorder.repaired, recorder.prefix_readers = fork_fixups.RANK_READERS, fork_fixups.PREFIX_READERS

    def make_auditor() -> Auditor:
        auditor_type = rank_runner.load_private_module(config["import_auditor"]).ImportAuditor
        auditors.append(auditor_type(config, INITIAL_MODULES, fork_fixups, proc_utils.list_children))
        return auditors[0]

    with server.origins if server else cleanup, cleanup:
        user_error, failed = preload_runner.run_preload(config, make_auditor)
    if user_error:
        cleanup.run()
        zygote_channel.send_message(control, {"op": "import_failed", "message": user_error})
        os._exit(0)
    unsafe = preload_runner.why_not_forkable(config, failed)
    if unsafe:
        for auditor in auditors:
            auditor.restore(environ)
    recorder.stop() if unsafe or not config["forks"] else recorder.finish()
    gc.freeze()
    if server:
        control, config = server.serve(not unsafe, cleanup, recorder)  # returns in the zygote of each run
        cleanup.is_shared = config["has_guardian"]
        if server.runs_served:
            began = time.monotonic()
    if unsafe:
        _exec_new_interpreter(control, config, unsafe, cleanup)
    hidden = None
    if config["forks"]:
        exits = [function for function, _, _ in cleanup.functions]
        hidden = hidden_modules.HiddenModules(recorder, config["import_environment"], config["native_reads"], exits)
    _send_ready(control, config, time.monotonic() - began, hidden)
    if not config["has_guardian"]:
        proc_utils.die_with_parent(0)
    return Zygote(control, config, cleanup, fork_fixups, hidden).run()


def _send_ready(
    control: socket.socket, config: ZygoteConfig, seconds: float, hidden: hidden_modules.HiddenModules | None
) -> None:
    """Report that ranks can be started; ``seconds``: duration of the imports. Exits if the launcher has ended."""
    ready: ReadyMessage = {
        "op": "ready",
        "forks": config["forks"],
        "failed": config["failed"],
        "unsafe": config["unsafe"],
        "import_s": seconds,
        "can_serve_store": hidden is not None and store_process.can_serve_store(hidden.modules),
        "pid": os.getpid(),
    }
    pidfd = proc_utils.open_pidfd(os.getpid()) if config["has_guardian"] else None
    try:
        zygote_channel.send_message(control, ready, [] if pidfd is None else [pidfd])
    except OSError:  # the launcher has ended
        os._exit(1)
    if pidfd is not None:
        os.close(pidfd)


def _exec_new_interpreter(
    control: socket.socket, config: ZygoteConfig, unsafe: str, cleanup: atexit_cleanup.AtexitCleanup
) -> NoReturn:
    """Exec a fresh zygote in this process, with the same socket, that imports less or execs every rank."""
    fresh: ZygoteConfig = {**config, "modules": config["fallback"], "fallback": [], "failed": unsafe}
    if not config["fallback"]:
        fresh = {**fresh, "forks": False, "failed": config["failed"], "unsafe": unsafe}
    control.set_inheritable(True)
    cleanup.run()
    words = [sys.executable, __file__, str(control.fileno()), json.dumps(fresh), *sys.argv[3:]]
    os.execv(sys.executable, words)


def _make_server(server_config: ServerConfig, config: ZygoteConfig, first: socket.socket) -> ZygoteServer:
    """Create the server that waits for a run or serves several; ``first``: connection of the first run."""
    module = rank_runner.load_private_module(server_config["file"])
    server: ZygoteServer = module.make_server(config, server_config["settings"], first, IGNORED_SIGNALS, rank_runner)
    return server


class Zygote:
    """The zygote's event loop: forks ranks and the store on request, reports signals and exits, sweeps."""

    def __init__(
        self,
        control: socket.socket,
        config: ZygoteConfig,
        cleanup: atexit_cleanup.AtexitCleanup,
        fork_fixups: ForkFixups | None,
        hidden: hidden_modules.HiddenModules | None,
    ) -> None:
        self.control, self.config, self.cleanup, self.fork_fixups = control, config, cleanup, fork_fixups
        self.hidden = hidden  # the preloaded modules; None if each rank is a new interpreter
        self.ranks: dict[int, int] = {}  # rank by pid, of those that run
        self.store: int | None = None  # pid of the store process
        self.store_errno = 0  # why there is no store, if one was requested
        self.woken, self.wake = proc_utils.open_wakeup_pipe()
        self.poll = select.poll()
        self.poll.register(self.control, select.POLLIN)
        self.poll.register(self.woken, select.POLLIN)
        # SIG_IGN first: it discards pending signals.
        self.inherited = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED_SIGNALS}
        ignored = config["ignores_sigchld"]
        self.inherited[signal.SIGCHLD] = signal.SIG_IGN if ignored else signal.getsignal(signal.SIGCHLD)
        for number in self.inherited:
            signal.signal(number, proc_utils.on_signal_noop)
        # signalfd gives the sender, too: a rank that sends one of these to its parent wants the job to end.
        self.stopping = proc_utils.open_signalfd(STOPPING)
        if self.stopping is not None:
            self.poll.register(self.stopping, select.POLLIN)
        read = () if self.stopping is None else STOPPING
        signal.pthread_sigmask(signal.SIG_BLOCK, read)
        unblocked = {*IGNORED_SIGNALS}.difference(read)  # the process that forked this one may block all
        signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)

    def run(self) -> RankStart:
        """Serve requests; returns only in the fork of a rank."""
        if os.getppid() != self.config["parent_pid"]:
            self.exit()
        while True:
            ready = {fd for fd, _ in self.poll.poll()}
            if not ready.isdisjoint((self.woken, self.stopping)):
                self.reap()
            if self.control.fileno() in ready:
                try:
                    request, fds = zygote_channel.receive_message(self.control)
                except (EOFError, OSError):
                    self.exit()
                if request["op"] == "spawn":
                    if rank := self.fork_rank(request, fds):
                        return rank
                elif request["op"] == "serve_store":
                    self.serve_store(fds)
                elif request["op"] == "sweep":
                    self.sweep(request["grace_s"], request["own_exit_timeout_s"])
                elif request["op"] == "remove_path":
                    self.config["remove_on_exit"].append(request["path"])

    def send(self, message: FromZygote, fds: Sequence[int] = ()) -> None:
        try:
            zygote_channel.send_message(self.control, message, fds)
        except OSError as error:
            if not fds or error.errno in (errno.EPIPE, errno.ECONNRESET):
                self.exit()
            self.send(message)  # too many descriptors in flight; the launcher can do without this one

    def reap(self) -> None:
        try:
            received = os.read(self.woken, 4096)
        except BlockingIOError:
            received = b""
        signals = [(number, 0) for number in received if number in IGNORED_SIGNALS]
        for number, sender in signals + (proc_utils.read_signalfd(self.stopping) if self.stopping is not None else []):
            self.send({"op": "signalled", "number": number, "rank": self.rank_of(sender)})
        self.send_exits(proc_utils.reap_children())

    def rank_of(self, pid: int) -> int | None:
        """Return the rank whose process or session this process is in; None for other processes."""
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
                self.send({"op": "store_exited", "pid": pid, "status": status})

    def serve_store(self, fds: list[int]) -> None:
        """Fork the store process of an attempt; the previous one is killed, with its contents.

        Ranks may connect before it serves: they wait in the socket's backlog.
        """
        if self.store is not None:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
        parent, self.store, self.store_errno = os.getpid(), None, errno.EMFILE
        if fds:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
            try:
                self.store, self.store_errno = os.fork(), 0
            except OSError as error:
                self.store_errno = error.errno or errno.EAGAIN
            if self.store == 0:
                self.become_store(fds[0], parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for fd in fds:
            os.close(fd)

    def become_store(self, listening: int, parent: int) -> NoReturn:
        """In the fork: serve the store until this process is killed, ignoring signals to all processes of the job."""
        try:
            proc_utils.set_process_title("ddplaunch: store of a run")
            signal.set_wakeup_fd(-1)
            for number in IGNORED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            os.setsid()
            proc_utils.die_with_parent(signal.SIGKILL)
            if os.getppid() == parent:
                self.control.close()
                for fd in filter(None, (self.woken, self.wake, self.stopping)):
                    os.close(fd)
                if self.hidden is not None:
                    self.hidden.show()
                store_process.serve_store(listening)
        except BaseException as error:
            os.write(2, f"ddplaunch: cannot start the store: {error}\n".encode())
        os._exit(1)

    def is_store(self, pid: int) -> bool:
        """Whether a process is the store, which ranks of other nodes may need after all ranks here have ended."""
        return pid == self.store

    def fork_rank(self, request: SpawnRequest, fds: list[int]) -> RankStart | None:
        """Fork a rank. Returns None in the zygote; in a fork that runs Python code, its ``RankStart``."""
        parent = os.getpid()
        pid: int | None = None
        number = self.store_errno or errno.EMFILE  # missing descriptors were lost to RLIMIT_NOFILE
        if len(fds) == len(request["fds"]) and not self.store_errno:
            # Signals sent to the fork are pending until it has set its handlers.
            if self.config["forks"]:
                rank_runner.preload_sides(request["job"])
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
            self.send({"op": "spawn_failed", "rank": request["rank"], "errno": number})
            return None
        self.ranks[pid] = request["rank"]
        pidfd = proc_utils.open_pidfd(pid)
        self.send({"op": "spawned", "rank": request["rank"], "pid": pid}, [] if pidfd is None else [pidfd])
        if pidfd is not None:
            os.close(pidfd)
        return None

    def setup_child(self, job: RankJob, fds: dict[str, int], parent: int) -> RankStart:
        """In the fork: undo all that the zygote has set up, except for its imported modules."""
        try:
            signal.set_wakeup_fd(-1)
            for inherited, handler in self.inherited.items():
                if inherited in proc_utils.FORWARDED_SIGNALS:
                    signal.signal(inherited, signal.SIG_IGN)  # discards a pending one: it was meant for a handler
                signal.signal(inherited, handler or signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.config["blocked_signals"])
            os.setsid()
            proc_utils.die_with_parent(signal.SIGKILL)
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
            if job["kind"] != "program":  # whose exec has an error of its own
                os.nice(job.get("nice", 0))
            if job["kind"] == "program" or not self.config["forks"]:
                self.exec_child(job, fds)
            self.cleanup.disable_in_rank()
            os.environ.update(job["env"])
            modules = self.hidden.modules if self.hidden is not None else {}
            if self.fork_fixups is not None:
                self.fork_fixups.apply_fixups(modules)
            proc_utils.set_process_title(job["title"])
            process_titles.ForkedProcessTitle(job["title"], proc_utils.set_process_title).install(modules)
            gc.enable()
        except BaseException as error:
            os.write(2, f"ddplaunch: cannot start rank {job['rank']}: {error}\n".encode())
            os._exit(1)
        return job, fds, self.hidden

    def exec_child(self, job: RankJob, fds: dict[str, int]) -> NoReturn:
        """In the fork: exec a fresh interpreter, or the program of ``--no-python``."""
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and exec would keep that
            signal.signal(number, signal.SIG_DFL)
        if job["kind"] == "program":
            # As a shell does: $0 of a script is this path.
            path = job["target_text"] if os.sep in job["target_text"] else job["path"]
            words = [job["target_text"], *job["args"]]
        else:
            job_fd = os.memfd_create("job", 0) if hasattr(os, "memfd_create") else _make_temporary_file()
            os.write(job_fd, marshal.dumps((job, fds, self.config["blocked_signals"])))  # type: ignore[arg-type]  # a TypedDict is a dict
            os.lseek(job_fd, 0, os.SEEK_SET)
            for fd in (job_fd, *fds.values()):
                os.set_inheritable(fd, True)
            path = sys.executable
            words = [path, rank_runner.__file__, str(job_fd), job["target_text"], *job["args"]]
        try:
            if job["kind"] == "program":
                os.nice(job.get("nice", 0))
                if "cwd" in job:
                    os.chdir(job["cwd"])
            os.execve(path, words, {**os.environ, **job["env"]})
        except OSError as error:
            shown = job["target_text"] if job["kind"] == "program" else path
            os.write(2, f"ddplaunch: cannot execute {shown}: {error.strerror}\n".encode())
            os._exit(126)

    def sweep(self, grace: float, helper_timeout_s: float) -> None:
        """Kill all leftover descendants: SIGTERM, then SIGKILL after ``grace`` seconds or at the next message.

        Helper processes of multiprocessing (forkserver, resource tracker) end by themselves. They have
        ``helper_timeout_s`` seconds before SIGTERM, and _HELPER_TIMEOUT_S more if nothing else is left, as they may be
        slow on a busy machine.
        """
        if min(grace, helper_timeout_s) > 0:
            self.wait(min(grace, helper_timeout_s))
            if all(proc_utils.is_multiprocessing_helper(pid) for pid in self.list_descendants()):
                self.wait(min(grace, _HELPER_TIMEOUT_S))
        left = self.list_descendants()
        described = [proc_utils.describe_process(pid) for pid in left if pid not in self.ranks]
        if left and grace > 0:
            for pid in left:
                proc_utils.send_signal(pid, signal.SIGTERM)
                proc_utils.send_signal(pid, signal.SIGCONT)
            self.wait(grace)
        stuck, ended = proc_utils.kill_descendants(os.getpid(), is_excluded=self.is_store)
        self.send_exits(ended)
        self.send({"op": "swept", "found": described, "stuck": stuck})

    def list_descendants(self) -> list[int]:
        return proc_utils.list_descendants(os.getpid(), is_excluded=self.is_store)

    def wait(self, seconds: float) -> None:
        """Wait until no descendant is left or a message of the launcher arrives, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and self.list_descendants():
            if self.control.fileno() in {fd for fd, _ in self.poll.poll(left * 1000)}:
                return
            self.reap()

    def exit(self) -> NoReturn:
        """Called when the launcher has ended: kill all descendants, remove the job's temporary files, exit."""
        proc_utils.kill_descendants(os.getpid())
        for path in self.config["remove_on_exit"]:
            _remove(path)
        self.cleanup.run()
        os._exit(0)


def _make_temporary_file() -> int:
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
    runner = rank_runner.RankRunner(*rank_runner.preallocate_stack_chunk(main)())
    rank_runner.preallocate_stack_chunk(rank_runner.run_program)(runner)
    runner.exit()
