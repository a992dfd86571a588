"""The process between the supervisor and the ranks: imports torch once, forks every rank, and outlives a dead supervisor.

Run from its path, as ``python zygote.py FD CONFIG``. It serves requests on the socket FD:

    spawn   start a rank: forked from here, or, where that is not safe or not wanted, a fresh interpreter
    sweep   end all that is left below, first politely for ``grace`` seconds

and answers ``ready``, ``refused``, ``spawned`` (with a pidfd), ``exited`` and ``swept``. When the supervisor's end of
the socket closes, however it died, everything below is killed and every temporary path removed.

It must stay single-threaded, compute nothing (libgomp hangs in a fork of a process that has used it) and never touch a
GPU. It adopts orphans, so whatever a rank leaves behind stays within reach.
"""

from __future__ import annotations

import sys

BASELINE = frozenset(sys.modules)  # what any interpreter has at its start
if not getattr(sys.flags, "safe_path", False):
    HERE = sys.path.pop(0)  # this file's folder, which no import of the user's may see

import gc  # noqa: E402
import os  # noqa: E402

gc.disable()  # no collection while a million long-lived objects are made; and their pages stay shared

import json  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from ddplaunch.agent import channel, processes, worker
else:
    from importlib.util import module_from_spec, spec_from_file_location

    def _sibling(name):
        """Load a file that stands beside this one without leaving its name in sys.modules."""
        spec = spec_from_file_location(name, os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py"))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    channel = _sibling("channel")
    processes = _sibling("processes")
    worker = _sibling("worker")


def main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    config = json.loads(sys.argv[2])
    # While torch loads nobody listens to the socket, so the kernel watches the supervisor; later we clean up ourselves.
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != config["supervisor"]:
        os._exit(1)
    processes.adopt_orphans()
    began = time.monotonic()
    unsafe = _preload(control, config)
    if unsafe and config["modules"]:
        # Start over with an empty interpreter, which then execs every rank: same process, same socket.
        fresh = {**config, "modules": [], "unsafe": unsafe}
        control.set_inheritable(True)
        os.execv(sys.executable, [sys.executable, __file__, sys.argv[1], json.dumps(fresh), *sys.argv[3:]])
    forks = bool(config["modules"])
    channel.send(
        control, {"op": "ready", "forks": forks, "unsafe": config["unsafe"], "seconds": time.monotonic() - began}
    )
    gc.freeze()
    processes.die_with_parent(0)
    Zygote(control, config, forks).serve()


def _preload(control: socket.socket, config: dict[str, Any]) -> str | None:
    """Import what the ranks share; return why they cannot be forked from the result, if so."""
    for name in config["modules"]:
        try:
            if name in config["asked"]:
                sys.path.insert(0, config["first"])
            __import__(name)
        except ModuleNotFoundError as error:
            if name in config["asked"]:
                _refuse(control, f"--preload {name}: {error}")
        except BaseException as error:
            if name in config["asked"]:
                _refuse(control, f"--preload {name}: {type(error).__name__}: {error}")
            return f"importing {name} failed"
        finally:
            if sys.path[0] == config["first"] and name in config["asked"]:
                sys.path.pop(0)
    if not config["modules"]:
        return None
    shadow = _shadowed(config["first"])
    if shadow:
        return f"{shadow} bears the name of a module that is loaded already"
    probe = os.fork()  # OpenBLAS stops its threads before a fork and starts them again when it computes
    if probe == 0:
        os._exit(0)
    os.waitpid(probe, 0)
    if (threads := _threads()) != 1:
        return f"{threads} threads run after importing {', '.join(config['modules'])}"
    if device := _open_gpu():
        return f"{device} is open after importing {', '.join(config['modules'])}"
    return None


def _refuse(control: socket.socket, message: str) -> NoReturn:
    channel.send(control, {"op": "refused", "message": message})
    os._exit(0)


def _shadowed(folder: str) -> str | None:
    """Find a file of the user's that ``import`` would have found before a module that we loaded."""
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    for name in names:
        stem, dot, _ = name.partition(".")
        module = sys.modules.get(stem)
        if module is None or stem in BASELINE or stem == "__main__":
            continue
        if not dot and not os.path.isfile(os.path.join(folder, name, "__init__.py")):
            continue
        if dot and not name.endswith((".py", ".so", ".pyc")):
            continue
        if not os.path.abspath(getattr(module, "__file__", None) or "/").startswith(folder + os.sep):
            return os.path.join(folder, name)
    return None


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")


def _open_gpu() -> str | None:
    try:
        for fd in os.listdir("/proc/self/fd"):
            try:
                path = os.readlink("/proc/self/fd/" + fd)
            except OSError:
                continue
            if path.startswith(_GPU_DEVICES):
                return path
    except OSError:
        pass
    return None


class Zygote:
    """Serves the supervisor's requests until its end of the socket closes."""

    def __init__(self, control: socket.socket, config: dict[str, Any], forks: bool) -> None:
        self.control = control
        self.config = config
        self.forks = forks
        self.ranks: dict[int, int] = {}  # pid to rank, of those that run
        self.woken, self.wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(self.wake, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> NoReturn:
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.woken, select.POLLIN)
        if os.getppid() != self.config["supervisor"]:
            self.leave()
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self.woken in ready:
                self.reap()
            if self.control.fileno() in ready:
                try:
                    request, fds = channel.receive(self.control)
                except (EOFError, OSError):
                    self.leave()
                if request["op"] == "spawn":
                    self.spawn(request, fds)
                elif request["op"] == "sweep":
                    self.sweep(request["grace"])

    def tell(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        try:
            channel.send(self.control, message, fds or [])
        except OSError:
            self.leave()

    def reap(self) -> None:
        try:
            os.read(self.woken, 4096)
        except BlockingIOError:
            pass
        self.report(processes.reap())

    def report(self, ended: list[tuple[int, int]]) -> None:
        for pid, status in ended:
            if pid in self.ranks:
                self.tell({"op": "exited", "rank": self.ranks.pop(pid), "pid": pid, "status": status})

    def spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        job = request["job"]
        handed = dict(zip(request["fds"], fds, strict=True))
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # a limit on processes or memory
            return self.tell(
                {"op": "refused", "message": f"rank {request['rank']} cannot be started: {error.strerror}"}
            )
        if pid == 0:
            self.become(job, handed, parent)
        for fd in fds:
            os.close(fd)
        self.ranks[pid] = request["rank"]
        pidfds = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
        self.tell({"op": "spawned", "rank": request["rank"], "pid": pid}, pidfds)
        for fd in pidfds:
            os.close(fd)

    def become(self, job: dict[str, Any], fds: dict[str, int], parent: int) -> NoReturn:
        """In the fork: leave nothing of the zygote but its modules, then be the user's program."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            processes.die_with_parent(signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            self.control.close()
            os.close(self.woken)
            os.close(self.wake)
            for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
                if name in fds:
                    fd = fds.pop(name)
                    os.dup2(fd, number)
                    if fd > 2:
                        os.close(fd)
            if job["cpus"]:
                os.sched_setaffinity(0, job["cpus"])
        except BaseException as error:
            os.write(2, f"ddplaunch: rank {job['rank']} could not start: {error}\n".encode())
            os._exit(1)
        if self.forks and job["kind"] != "program":
            os.environ.update(job["env"])
            for stream in (sys.stdout, sys.stderr):
                worker.buffer_lines(stream, stream is sys.stderr or job["line_buffered"] or os.isatty(1))
            _retitle(job["title"])
            gc.enable()
            worker.run(job, fds, forked=True)
        if "store" in fds:
            os.close(
                fds.pop("store")
            )  # a fresh interpreter must not import torch before the user does: theirs opens it
        self.execute(job, fds)

    def execute(self, job: dict[str, Any], fds: dict[str, int]) -> NoReturn:
        """In the fork: become a fresh interpreter, or the program of ``--no-python``."""
        environment = {**os.environ, **job["env"]}
        try:
            if job["kind"] == "program":
                os.execve(job["path"], [job["typed"], *job["args"]], environment)
            import marshal

            handed = os.memfd_create("job", 0) if hasattr(os, "memfd_create") else _unlinked_file()
            os.write(handed, marshal.dumps((job, fds)))
            os.lseek(handed, 0, os.SEEK_SET)
            for fd in (handed, *fds.values()):
                os.set_inheritable(fd, True)
            program = [sys.executable, worker.__file__, str(handed), job["typed"], *job["args"]]
            os.execve(sys.executable, program, environment)
        except OSError as error:
            shown = job["typed"] if job["kind"] == "program" else sys.executable
            os.write(2, f"ddplaunch: cannot execute {shown}: {error.strerror}\n".encode())
            os._exit(126)

    def sweep(self, grace: float) -> None:
        """End all that is left below: SIGTERM, then SIGKILL after ``grace`` seconds or as soon as we hear anything."""
        left = processes.descendants(os.getpid())
        found = [processes.describe(pid) for pid in left if pid not in self.ranks]
        if left and grace > 0:
            for pid in left:
                processes.send(pid, signal.SIGTERM)
                processes.send(pid, signal.SIGCONT)
            deadline = time.monotonic() + grace
            poll = select.poll()
            poll.register(self.control, select.POLLIN)
            poll.register(self.woken, select.POLLIN)
            while (wait := deadline - time.monotonic()) > 0 and processes.descendants(os.getpid()):
                if self.control.fileno() in {fd for fd, _ in poll.poll(wait * 1000)}:
                    break
                self.reap()
        stuck, ended = processes.kill_all_below(os.getpid())
        self.report(ended)
        self.tell({"op": "swept", "found": found, "stuck": stuck})

    def leave(self) -> NoReturn:
        """The supervisor is gone: so is everything that it started, and every file that only this job needed."""
        processes.kill_all_below(os.getpid())
        for path in self.config["temporary"]:
            _remove(path)
        os._exit(0)


def _unlinked_file() -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _remove(path: str) -> None:
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            import shutil

            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        pass


def _retitle(title: str) -> None:
    """Have ``ps`` show the user's command: written over our own argument area, as setproctitle does (proc(5), cmdline).

    The supervisor padded our command line so that there is room. Where the last byte is no NUL the kernel takes the
    text up to the first one.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
        room = end - start - 2
        text = title.encode(errors="replace")[:room]
        import ctypes

        ctypes.memmove(start, text + b"\0" * (end - start - 1 - len(text)) + b" ", end - start)
    except Exception:
        pass  # the name in ps is a courtesy


if __name__ == "__main__":
    main()
