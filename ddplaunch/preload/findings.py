"""What an import does beyond making modules, and during which modules: noted inside the interpreter of a trial.

Standard library only; run from its path. Reads and writes of variables are seen as Python makes them (os.environ is
traced); for those that native code makes, the shared objects are named that each import has mapped.
"""

from __future__ import annotations

import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ddplaunch.preload import import_stack

RANK_VARIABLE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|CROSS_)?(RANK|WORLD_SIZE)|(PET_)?NODE_RANK|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|DDPLAUNCH_\w+|\w+_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
    r"|(SLURM|SUBMITIT|FLUX|JSM|JSRUN|OMPI|PMI|PMIX|PALS|MPI|MV2|MVP|LSF?|PBS|SGE|HOROVOD|MPICH)_?\w*"
    r"(RANK|RANKID|PROCID|LOCALID|LOCALRANKID|NODEID|TASKID|TASK_ID|TASK_PID|WORLD_SIZE)"
)
"""Variables in which the ranks of a node differ, or that a rank has and the process that forks it has not."""

_HARMLESS = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|LANG|LANGUAGE|LC_\w+|TZ|TERM|COLORTERM|COLUMNS|LINES|NO_COLOR"
    r"|FORCE_COLOR|CLICOLOR\w*|PYTHON\w+|DISPLAY|TMUX|SSH_\w+|XDG_SESSION_\w+|_"
)
"""Variables that say who and where a user is: no program sets them to tell its libraries something."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ASKING = frozenset({"ctypes.util", "platform", "uuid"})
"""Modules of Python's own that start a program to learn about the machine, and keep what it answers."""

SETS = "sets the variable "
"""Begins what is said of a variable that was not set before."""

_NATIVE = re.compile(r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|VECLIB|NUMEXPR|MALLOC|LD|DYLD|PYTHON|CUDA|NCCL|GLOO|UCX)_?\w*")
"""Variables that native code, or Python itself, may read at any time from the program's first line on."""

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")


class Findings:
    """All that was noted, in the order in which it happened.

    Attributes:
        found: the stack of modules, what was done ("makes a temporary folder"), and for a read its variable.
        read: the stacks in which a variable was read by its name; "excused" ones of a rank's variables are left out.
        libraries: shared objects with the stack in which they were mapped.
        changed: the stacks in which something that is only compared at the end was changed, by what that is.
    """

    def __init__(self, imports: import_stack.ImportStack, repaired: frozenset[str]) -> None:
        self._imports, self._repaired = imports, repaired
        self.found: dict[tuple[tuple[str, ...], str], None] = {}
        self.read: dict[str, dict[tuple[str, ...], None]] = {}
        self.libraries: dict[str, tuple[str, ...]] = {}
        self.changed: dict[str, dict[tuple[str, ...], None]] = {}
        self.quiet = False  # while nothing is to be noted
        self.maps = True  # whether something may have been mapped since the last look

    def note(self, what: str, stack: tuple[str, ...] | None = None) -> None:
        stack = tuple(self._imports.modules) if stack is None else stack
        if stack and not self.quiet:
            self.found[stack, what] = None

    def change(self, what: str) -> None:
        if not self.quiet:
            self.changed.setdefault(what, {})[tuple(self._imports.modules)] = None

    def install(self) -> None:
        """Trace from here on; there is no way back."""
        for environ in (os.environ, getattr(os, "environb", None)):
            if environ is not None:
                environ.__dict__["_see"] = self._see
                environ.__class__ = _traced(type(environ))
        sys.addaudithook(self._hear)

    def _see(self, name: object) -> None:
        if not self._imports.modules or self.quiet:
            return
        name = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
        reader = _outside({"os", "_collections_abc", "collections.abc"})
        if RANK_VARIABLE.fullmatch(name):
            if reader in self._repaired:
                return
            self.note(f"reads {name}")
        self.read.setdefault(name, {})[tuple(self._imports.modules)] = None

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self._imports.modules and not self.quiet and (judge := _EVENTS.get(event)):
            try:
                what = judge(*args)
            except Exception:  # of arguments that no documentation promises
                what = f"does what nobody understood ({event})"
            if what:
                self.note(what)
            if what and event == "os.putenv":
                self.change("$" + os.fsdecode(args[0]))
        if event == "ctypes.dlopen":
            self.maps = True

    def look_at_maps(self) -> None:
        """Note which shared objects were mapped since the last look, and memory that forks would share."""
        if not self.maps:
            return
        self.maps = False
        stack = tuple(self._imports.modules)
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
        for line in lines:
            fields = line.split(None, 5)
            path = fields[5] if len(fields) > 5 else ""
            if ".so" in path and path not in self.libraries:
                self.libraries[path] = stack
            if fields[1][3] == "s" and path not in self.libraries:
                self.libraries[path] = stack
                self.note("makes memory that forks share", stack)


def _traced(base: Any) -> type:
    """Make a class like os.environ's that tells of each read by name, and of none made by reading all."""

    class _Environ(base):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Any:
            listed = self.__dict__.get("_listed")  # names that somebody has listed and reads in order: dict(os.environ)
            if listed and listed[-1] == key:
                listed.pop()
            else:
                self.__dict__["_see"](key)
            return base.__getitem__(self, key)

        def __contains__(self, key: object) -> bool:
            self.__dict__["_see"](key)
            return base.__contains__(self, key)  # type: ignore[no-any-return]

        def __iter__(self) -> Iterator[Any]:
            names = list(base.__iter__(self))
            self.__dict__["_listed"] = names[::-1]
            return iter(names)

    _Environ.__module__, _Environ.__qualname__ = "os", "_Environ"
    return _Environ


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
    if not flags & _WRITING or path.startswith(("/dev/null", "/dev/tty", "/dev/shm/", "/proc/")) or _own(path):
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


def _sets(name: bytes, value: bytes | None = None) -> str | None:
    key: Any = name
    before = os.environ._data.get(key)  # type: ignore[attr-defined]
    if before == value:
        return None
    return f"{SETS if before is None else 'changes the variable '}{os.fsdecode(name)}"


def _says(what: str) -> Callable[..., str]:
    return lambda *args: what


_EVENTS: dict[str, Callable[..., str | None]] = {
    "open": _opens,
    "tempfile.mkstemp": _says("makes a temporary file"),
    "tempfile.mkdtemp": _says("makes a temporary folder"),
    "os.mkdir": _makes_folder,
    "os.rename": _changes,
    "os.remove": _changes,
    "os.rmdir": _changes,
    "os.link": _changes,
    "os.symlink": _changes,
    "os.truncate": _changes,
    "os.chmod": _changes,
    "os.putenv": _sets,
    "os.unsetenv": _sets,
    "os.chdir": _says("changes the working directory"),
    "os.fork": _says("forks"),
    "os.forkpty": _says("forks"),
    "os.posix_spawn": _starts,
    "os.exec": _starts,
    "os.system": _starts,
    "subprocess.Popen": _starts,
    "socket.connect": _says("opens a connection"),
    "socket.sendto": _says("sends on a socket"),
    "mmap.__new__": lambda fd, *rest: "makes memory that forks share" if fd == -1 else None,
    "resource.setrlimit": _says("sets a resource limit"),
    "sys.settrace": _says("sets a trace function"),
    "sys.setprofile": _says("sets a profile function"),
    "signal.pthread_kill": _says("sends a signal"),
    "os.kill": _says("sends a signal"),
}


def _short(path: Any) -> str:
    text, home = os.fsdecode(path), os.path.expanduser("~")
    return "~" + text[len(home) :] if text.startswith(home + "/") else text


def settable(name: str) -> bool:
    """Whether a program cannot mind that an import has set this variable before the program's first line."""
    return not (_NATIVE.fullmatch(name) or RANK_VARIABLE.fullmatch(name) or harmless(name))


def harmless(name: str) -> bool:
    """Whether a read of this variable says nothing about the program."""
    return _HARMLESS.fullmatch(name) is not None
