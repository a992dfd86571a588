"""Records what an import does besides making modules, and in which module, inside an audit's interpreters.

Standard library only; run from its path. What Python does is recorded (os.environ is traced, audit events seen, a few
functions are wrapped); for what native code reads, environment.py asks the C library.
"""

from __future__ import annotations

import atexit
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from tests.preload_audit import import_stack

RANK_VARIABLE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|CROSS_)?(RANK|WORLD_SIZE)|(PET_)?NODE_RANK|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|DDPLAUNCH_\w+|\w+_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
    r"|(SLURM|SUBMITIT|FLUX|JSM|JSRUN|OMPI|PMI|PMIX|PALS|MPI|MV2|MVP|LSF?|PBS|SGE|HOROVOD|MPICH)_?\w*"
    r"(RANK|RANKID|PROCID|LOCALID|LOCALRANKID|NODEID|TASKID|TASK_ID|TASK_PID|WORLD_SIZE)"
)
"""Variables in which the ranks of a node differ, or that a rank has and the process that forks it has not."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ASKING = frozenset({"ctypes.util", "platform", "uuid"})
"""Modules of Python's own that start a program to learn about the machine, and keep what it answers."""

_OF_IMPORTS = frozenset({"importlib", "importlib._bootstrap_external", "_frozen_importlib_external", "zipimport"})
_METADATA = ("importlib.metadata", "importlib_metadata", "pkg_resources")
"""What lists the folders of ``sys.path`` for what is installed: a program's folder has none of that."""

_LOOKING = frozenset({"inspect", "linecache", "warnings", "traceback", "abc", "pickle"})
"""What asks each module for its name or file, ``__main__`` too, to find one of them."""

SETS = "sets the variable "
"""Prefix of a finding on a variable that was not set before."""

WHOLE = "reads the whole environment"
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")


class Findings:
    """All that was noted, in the order in which it happened.

    Attributes:
        found: the stack of modules, what was done ("makes a temporary folder"), and for a read its variable.
        read: the stacks in which a variable was read by its name; those that a fork repairs are left out.
        changed: the stacks in which something that is only compared at the end was changed, by what that is.
    """

    def __init__(
        self, imports: import_stack.ImportStack, repaired: frozenset[str], excuses: ModuleType, folders: list[str]
    ):
        """``folders``: the script's and the working one; no import may look into either."""
        self._imports, self._repaired, self._folders = imports, repaired, folders
        self._excused = excuses
        self.actions: dict[tuple[tuple[str, ...], str], None] = {}
        self.variable_reads: dict[str, dict[tuple[str, ...], None]] = {}
        self._shared = set[str]()  # files whose memory forks would share
        self.state_changes: dict[str, dict[tuple[str, ...], None]] = {}
        self.quiet = False  # while nothing is to be noted
        self.maps = True  # whether something may have been mapped since the last look

    def note(self, what: str, stack: tuple[str, ...] | None = None) -> None:
        stack = tuple(self._imports.modules) if stack is None else stack
        if what == WHOLE and stack and (prefix := self._excused.PREFIXES.get(stack[-1])):
            self.variable_reads.setdefault(f"{prefix}*", {})[stack] = None
            return
        if stack and not self.quiet and not self._excused.done(what, stack):
            self.actions[stack, what] = None

    def change(self, what: str) -> None:
        if not self.quiet:
            self.state_changes.setdefault(what, {})[tuple(self._imports.modules)] = None

    def install(self, tracing: ModuleType, words: list[str]) -> None:
        """Trace from here on, until the process ends."""
        tracing.trace_environment(self.see, self.note)
        self._data = tracing.data
        tracing.trace_arguments(words, self._asked)
        for name in ("stat", "lstat", "access", "readlink"):
            self._watch_paths(name)
        self._watch(atexit, "register", "at exit")
        self._watch(os, "register_at_fork", "at a fork")
        sys.addaudithook(self._on_audit_event)

    def read_main(self, what: str) -> None:
        """``__main__`` was asked for something."""
        self._asked(what)

    def finished(self, name: str) -> None:
        """Watch what a module has that was just executed."""
        if name == "threading":
            self._watch(sys.modules[name], "_register_atexit", "at exit")

    def _asked(self, what: str) -> None:
        if self._imports.modules and not self.quiet and _outside({"environment"}) not in _LOOKING:
            self.note(what)

    def see(self, name: object) -> None:
        if not self._imports.modules or self.quiet:
            return
        name = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
        reader = _outside({"os", "_collections_abc", "collections.abc", "environment"})
        if RANK_VARIABLE.fullmatch(name):
            if reader in self._repaired:
                return
            self.note(f"reads {name}")
            return
        self.variable_reads.setdefault(name, {})[tuple(self._imports.modules)] = None

    def see_in_native_code(self, name: str) -> None:
        if not self._imports.modules or self.quiet:
            return
        if RANK_VARIABLE.fullmatch(name):
            self.note(f"reads {name} in native code")
        else:
            self.variable_reads.setdefault(name, {})[tuple(self._imports.modules)] = None

    def _watch(self, module: Any, name: str, when: str) -> None:
        register = getattr(module, name)

        def registering(*functions: Any, **named: Any) -> Any:
            given = [*functions[:1], *named.values()] if when != "at exit" else functions[:1]
            for each in given:
                origin = getattr(each, "__func__", getattr(each, "func", each))
                shown = f"{getattr(origin, '__module__', None)}.{getattr(origin, '__qualname__', type(each).__name__)}"
                if shown.partition(".")[0] not in sys.stdlib_module_names or getattr(each, "func", None) is not None:
                    self.note(f"registers {shown} to run {when}")
                elif (by := _outside({"atexit_cleanup"})).partition(".")[0] not in sys.stdlib_module_names:
                    self.note(f"registers {shown} to run {when}, from {by}")
            return register(*functions, **named)

        setattr(module, name, registering)

    def _watch_paths(self, name: str) -> None:
        ask = getattr(os, name)

        def asking(path: Any, *args: Any, **named: Any) -> Any:
            if self._imports.modules and not self.quiet and isinstance(path, (str, bytes, os.PathLike)):
                self._look_at_path(os.fsdecode(path))
            return ask(path, *args, **named)

        asking.__module__, asking.__name__, asking.__qualname__ = "posix", name, name
        setattr(os, name, asking)

    def _look_at_path(self, path: str, *, lists: bool = False) -> None:
        full = os.path.normpath(os.path.join(self._folders[-1], path))
        for folder in self._folders:
            if full == folder or full.startswith(folder + os.sep):
                if not _from(_OF_IMPORTS, _METADATA):
                    which = "program's" if folder == self._folders[0] else "working"
                    what = "lists" if lists else f"looks for {os.path.relpath(full, folder)} in"
                    self.note(f"{what} the {which} folder")
                return

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._imports.modules and not self.quiet and (judge := _EVENTS.get(event)):
            try:
                what = judge(*args)
                if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], (str, bytes, type(None))):
                    self._look_at_path(os.fsdecode(args[0] or "."), lists=event != "open")
                if event == "os.putenv":
                    what = self._sets(*args)
            except Exception:  # of arguments that no documentation promises
                what = f"does something unknown ({event})"
            if what:
                self.note(what)
            if what and event == "os.putenv":
                self.change("$" + os.fsdecode(args[0]))
        if event == "ctypes.dlopen":
            self.maps = True

    def _sets(self, name: bytes, value: bytes) -> str | None:
        before = self._data().get(name)
        if before == value:
            return None
        return f"{SETS if before is None else 'changes the variable '}{os.fsdecode(name)}"

    def look_at_maps(self) -> None:
        """Note memory that forks would share and that was mapped since the last look."""
        if not self.maps:
            return
        self.maps = False
        stack = tuple(self._imports.modules)
        self.quiet, before = True, self.quiet
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
        self.quiet = before
        for line in lines:
            fields = line.split(None, 5)
            path = fields[5] if len(fields) > 5 else ""
            if fields[1][3] == "s" and ".so" not in path and path not in self._shared:
                self._shared.add(path)
                self.note("makes memory that forks share", stack)


def _outside(modules: set[str]) -> str:
    """Name the module whose code led here, but for ours and these."""
    frame: Any = sys._getframe(1)
    here = frame.f_code.co_filename
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_filename != here and name not in modules:
            return str(name)
        frame = frame.f_back
    return ""


def _callers() -> set[tuple[str, str]]:
    """The module and function of each frame up to here."""
    frame, found = sys._getframe(1), set[tuple[str, str]]()
    while frame is not None:
        found.add((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _from(modules: frozenset[str], packages: tuple[str, ...]) -> bool:
    """Whether one of these asks, called by whom it may."""
    name = _outside({"genericpath", "posixpath", "pathlib", "pathlib._abc", "pathlib._local", "glob", "fnmatch", "os"})
    if name == "_distutils_hack" or name in modules:
        return True
    return any(caller.startswith(packages) for caller, _ in _callers())


def _own(path: object) -> bool:
    """Whether Python writes there by itself: bytecode, and the file by which it finds out where to put others."""
    if "__pycache__" in str(path):
        return True
    callers = _callers()
    return not callers.isdisjoint(
        {("tempfile", "_get_default_tempdir"), ("importlib._bootstrap_external", "_write_atomic")}
        | {("_frozen_importlib_external", "_write_atomic")}
    )


def _opens(path: object, mode: object, flags: int) -> str | None:
    if not isinstance(path, (str, bytes)):
        return None  # a descriptor
    path = os.fsdecode(path)
    if path.startswith(_DEVICES):
        return f"opens {path}"
    if path == "/dev/tty":
        return "opens the terminal"
    if not flags & _WRITING or path == os.devnull or _own(path):
        return None
    return f"writes {_short(path)}"


def _makes_folder(path: Any, *_: object) -> str | None:
    return None if _own(path) or os.path.isdir(path) else f"makes the folder {_short(path)}"


def _changes(path: Any, *_: object) -> str | None:
    return None if _own(path) else f"changes {_short(path)}"


def _starts(program: Any, *_: object) -> str | None:
    if any(name in _ASKING for name, _ in _callers()):
        return None
    if isinstance(program, (list, tuple)) and program:
        program = program[0]
    return f"starts {os.path.basename(os.fsdecode(program))}"


def _says(what: str) -> Callable[..., str | None]:
    return lambda *args: what


_EVENTS: dict[str, Callable[..., str | None]] = {
    "open": _opens,
    **dict.fromkeys(("os.listdir", "os.scandir", "os.putenv"), lambda *args: None),  # looked at by themselves
    "tempfile.mkstemp": _says("makes a temporary file"),
    "tempfile.mkdtemp": _says("makes a temporary folder"),
    "os.mkdir": _makes_folder,
    **{
        f"os.{name}": _changes
        for name in ["rename", "remove", "rmdir", "link", "symlink", "truncate", "chmod", "utime"]
    },
    "os.unsetenv": lambda name: f"changes the variable {os.fsdecode(name)}",
    "os.chdir": _says("changes the working directory"),
    **dict.fromkeys(("os.fork", "os.forkpty"), _says("forks")),
    **dict.fromkeys(("os.posix_spawn", "os.exec", "os.system", "subprocess.Popen"), _starts),
    "socket.connect": _says("opens a connection"),
    "socket.sendto": _says("sends on a socket"),
    "socket.bind": _says("binds a socket"),
    **dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname"), _says("looks a host up")),
    "mmap.__new__": lambda fd, *rest: "makes memory that forks share" if fd == -1 else None,
    "resource.setrlimit": _says("sets a resource limit"),
    "sys.settrace": _says("sets a trace function"),
    "sys.setprofile": _says("sets a profile function"),
    "sys.addaudithook": _says("adds an audit hook"),
    **dict.fromkeys(("signal.pthread_kill", "os.kill"), _says("sends a signal")),
}


def _short(path: Any) -> str:
    text, home = os.fsdecode(path), os.path.expanduser("~")
    return "~" + text[len(home) :] if text.startswith(home + "/") else text
