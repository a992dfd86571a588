"""Records what an import does besides defining modules, and which modules do it, inside an audit's interpreters.

Standard library only; loaded by its path. What Python code does is seen by tracing os.environ and sys.argv, by audit
events and by a few wrapped functions; what native code reads, environment.py takes from the C library.
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

    from tests.tools.preload_audit import import_stack

RANK_VARIABLE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|CROSS_)?(RANK|WORLD_SIZE)|(PET_)?NODE_RANK|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|DDPLAUNCH_\w+|\w+_VISIBLE_DEVICES|ZE_AFFINITY_MASK"
    r"|(SLURM|SUBMITIT|FLUX|JSM|JSRUN|OMPI|PMI|PMIX|PALS|MPI|MV2|MVP|LSF?|PBS|SGE|HOROVOD|MPICH)_?\w*"
    r"(RANK|RANKID|PROCID|LOCALID|LOCALRANKID|NODEID|TASKID|TASK_ID|TASK_PID|WORLD_SIZE)"
)
"""Variables in which the ranks of a node differ, or that a rank has and the process that forks it has not."""

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")

_MACHINE_MODULES = frozenset({"ctypes.util", "platform", "uuid"})
"""Modules of Python that start a program to learn about the machine, and cache its answer."""

_PATH_MODULES = frozenset(
    {"genericpath", "posixpath", "pathlib", "pathlib._abc", "pathlib._local", "glob", "fnmatch", "os"}
)
_IMPORT_MODULES = frozenset(
    {"importlib", "importlib._bootstrap_external", "_frozen_importlib_external", "zipimport", "_distutils_hack"}
)
_METADATA_PACKAGES = ("importlib.metadata", "importlib_metadata", "pkg_resources")
"""Packages that list the folders of ``sys.path`` for what is installed: a program's folder has none of that."""

_INTROSPECTION_MODULES = frozenset({"inspect", "linecache", "warnings", "traceback", "abc", "pickle"})
"""Modules that ask all modules for their names or files, ``__main__`` too, to find one of them."""

_PYTHON_WRITES = frozenset(
    {
        ("tempfile", "_get_default_tempdir"),
        ("importlib._bootstrap_external", "_write_atomic"),
        ("_frozen_importlib_external", "_write_atomic"),
    }
)
"""Functions of Python that write files by themselves: bytecode, and a test of the folder for temporary files."""

SETS = "sets the variable "
"""Prefix of the action of setting a variable that was not set before."""

WHOLE = "reads the whole environment"


class Recorder:
    """All recorded actions, in the order in which they happened.

    Attributes:
        actions: the stack of modules, and what was done ("makes a temporary folder").
        state_changes: by process state that is compared at the end only: the stacks in which it was changed.
    """

    def __init__(self, imports: import_stack.ImportStack, fixups: ModuleType, allowed: ModuleType, folders: list[str]):
        """Create a recorder.

        Args:
            imports: the modules whose imports run.
            fixups: fork_fixups.py.
            allowed: allowed_differences.py.
            folders: the script's and the working one, not to be looked into.
        """
        self._imports, self._allowed, self._folders = imports, allowed, folders
        self._repaired, self._prefix_readers = fixups.RANK_READERS, fixups.PREFIX_READERS
        self.actions: dict[tuple[tuple[str, ...], str], None] = {}
        self.state_changes: dict[str, dict[tuple[str, ...], None]] = {}
        self._shared_files = set[str]()  # files whose memory forks would share
        self.is_paused = False
        self.may_have_new_maps = True  # whether memory may have been mapped since it was last checked

    def record(self, action: str, stack: tuple[str, ...] | None = None) -> None:
        stack = tuple(self._imports.modules) if stack is None else stack
        if action == WHOLE and stack and stack[-1] in self._prefix_readers:
            return
        if stack and not self.is_paused and not self._allowed.is_allowed(action, stack):
            self.actions[stack, action] = None

    def record_change(self, state: str) -> None:
        if not self.is_paused:
            self.state_changes.setdefault(state, {})[tuple(self._imports.modules)] = None

    def install(self, environment: ModuleType, words: list[str]) -> None:
        """Trace from here on, until the process ends; ``words`` become ``sys.argv``."""
        environment.trace_environment(self.on_variable_read, self.record)
        self._get_variables = environment.get_variables
        environment.trace_arguments(words, self.on_arguments_read)
        for name in ("stat", "lstat", "access", "readlink"):
            self._wrap_path_function(name)
        self._wrap_register(atexit, "register", "at exit")
        self._wrap_register(os, "register_at_fork", "at a fork")
        sys.addaudithook(self._on_audit_event)

    def on_module_end(self, name: str) -> None:
        """Called when a module was executed: wrap what it has to register functions."""
        if name == "threading":
            self._wrap_register(sys.modules[name], "_register_atexit", "at exit")

    def on_arguments_read(self, action: str) -> None:
        """Called when ``sys.argv`` or ``__main__`` is read."""
        if self._is_active() and _find_caller({"environment"}) not in _INTROSPECTION_MODULES:
            self.record(action)

    def on_variable_read(self, name: object) -> None:
        """Called when Python code reads a variable by its name."""
        if self._is_active():
            name = os.fsdecode(name) if isinstance(name, (str, bytes)) else ""
            reader = _find_caller({"os", "_collections_abc", "collections.abc", "environment"})
            if RANK_VARIABLE.fullmatch(name) and reader not in self._repaired:
                self.record(f"reads {name}")

    def on_native_variable_read(self, name: str) -> None:
        """Called when native code has read a variable."""
        if self._is_active() and RANK_VARIABLE.fullmatch(name):
            self.record(f"reads {name} in native code")

    def record_shared_memory(self) -> None:
        """Record memory that forks would share and that was mapped since the last call."""
        if not self.may_have_new_maps:
            return
        self.may_have_new_maps = False
        stack = tuple(self._imports.modules)
        self.is_paused, before = True, self.is_paused
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
        self.is_paused = before
        for line in lines:
            fields = line.split(None, 5)
            path = fields[5] if len(fields) > 5 else ""
            if fields[1][3] == "s" and ".so" not in path and path not in self._shared_files:
                self._shared_files.add(path)
                self.record("makes memory that forks share", stack)

    def _is_active(self) -> bool:
        return bool(self._imports.modules) and not self.is_paused

    def _wrap_register(self, module: Any, name: str, when: str) -> None:
        """Record what a function of ``module`` registers to be called later."""
        register = getattr(module, name)

        def wrapped_register(*functions: Any, **named: Any) -> Any:
            for each in functions[:1] if when == "at exit" else (*functions[:1], *named.values()):
                origin = getattr(each, "__func__", getattr(each, "func", each))
                shown = f"{getattr(origin, '__module__', None)}.{getattr(origin, '__qualname__', type(each).__name__)}"
                if not _is_stdlib(shown) or getattr(each, "func", None) is not None:
                    self.record(f"registers {shown} to run {when}")
                elif not _is_stdlib(caller := _find_caller({"atexit_cleanup"})):
                    self.record(f"registers {shown} to run {when}, from {caller}")
            return register(*functions, **named)

        setattr(module, name, wrapped_register)

    def _wrap_path_function(self, name: str) -> None:
        """Record the paths that a function of ``os`` gets."""
        function = getattr(os, name)

        def wrapped_function(path: Any, *args: Any, **named: Any) -> Any:
            if self._is_active() and isinstance(path, (str, bytes, os.PathLike)):
                self._check_path(os.fsdecode(path))
            return function(path, *args, **named)

        wrapped_function.__module__, wrapped_function.__name__, wrapped_function.__qualname__ = "posix", name, name
        setattr(os, name, wrapped_function)

    def _check_path(self, path: str, *, lists: bool = False) -> None:
        """Record a look into the script's or the working folder."""
        full = os.path.normpath(os.path.join(self._folders[-1], path))
        for folder in self._folders:
            if full == folder or full.startswith(folder + os.sep):
                if not _is_import_lookup():
                    which = "program's" if folder == self._folders[0] else "working"
                    action = "lists" if lists else f"looks for {os.path.relpath(full, folder)} in"
                    self.record(f"{action} the {which} folder")
                return

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._is_active():
            try:
                action = self._describe_event(event, args)
            except Exception:  # of arguments that no documentation promises
                action = f"does something unknown ({event})"
            if action:
                self.record(action)
        if event == "ctypes.dlopen":
            self.may_have_new_maps = True

    def _describe_event(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event in ("open", "os.listdir", "os.scandir") and isinstance(args[0], (str, bytes, type(None))):
            self._check_path(os.fsdecode(args[0] or "."), lists=event != "open")
        if event == "os.putenv":
            return self._describe_putenv(*args)
        describe = _EVENTS.get(event)
        return describe(*args) if callable(describe) else describe

    def _describe_putenv(self, name: bytes, value: bytes) -> str | None:
        before = self._get_variables().get(name)
        if before == value:
            return None
        self.record_change("$" + os.fsdecode(name))
        return f"{SETS if before is None else 'changes the variable '}{os.fsdecode(name)}"


def _is_stdlib(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _find_caller(skipped: frozenset[str] | set[str]) -> str:
    """The innermost module whose code led here, except this one and ``skipped``."""
    frame: Any = sys._getframe(1)
    here = frame.f_code.co_filename
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_filename != here and name not in skipped:
            return str(name)
        frame = frame.f_back
    return ""


def _list_callers() -> set[tuple[str, str]]:
    """The module and function of each frame up to here."""
    frame, found = sys._getframe(1), set[tuple[str, str]]()
    while frame is not None:
        found.add((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _is_import_lookup() -> bool:
    """Whether a path is looked at by an import, or for the metadata of what is installed."""
    if _find_caller(_PATH_MODULES) in _IMPORT_MODULES:
        return True
    return any(caller.startswith(_METADATA_PACKAGES) for caller, _ in _list_callers())


def _is_written_by_python(path: object) -> bool:
    return "__pycache__" in str(path) or not _list_callers().isdisjoint(_PYTHON_WRITES)


def _describe_open(path: object, mode: object, flags: int) -> str | None:
    if not isinstance(path, (str, bytes)):
        return None  # a descriptor
    path = os.fsdecode(path)
    if path.startswith(_DEVICES):
        return f"opens {path}"
    if path == "/dev/tty":
        return "opens the terminal"
    if not flags & _WRITE_FLAGS or path == os.devnull or _is_written_by_python(path):
        return None
    return f"writes {_format_path(path)}"


def _describe_mkdir(path: Any, *_: object) -> str | None:
    if _is_written_by_python(path) or os.path.isdir(path):
        return None
    return f"makes the folder {_format_path(path)}"


def _describe_file_change(path: Any, *_: object) -> str | None:
    return None if _is_written_by_python(path) else f"changes {_format_path(path)}"


def _describe_start(program: Any, *_: object) -> str | None:
    if any(name in _MACHINE_MODULES for name, _ in _list_callers()):
        return None
    if isinstance(program, (list, tuple)) and program:
        program = program[0]
    return f"starts {os.path.basename(os.fsdecode(program))}"


def _format_path(path: Any) -> str:
    text, home = os.fsdecode(path), os.path.expanduser("~")
    return "~" + text[len(home) :] if text.startswith(home + "/") else text


_EVENTS: dict[str, str | Callable[..., str | None]] = {
    "open": _describe_open,
    "tempfile.mkstemp": "makes a temporary file",
    "tempfile.mkdtemp": "makes a temporary folder",
    "os.mkdir": _describe_mkdir,
    **{
        f"os.{name}": _describe_file_change
        for name in ["rename", "remove", "rmdir", "link", "symlink", "truncate", "chmod", "utime"]
    },
    "os.unsetenv": lambda name: f"changes the variable {os.fsdecode(name)}",
    "os.chdir": "changes the working directory",
    **dict.fromkeys(("os.fork", "os.forkpty"), "forks"),
    **dict.fromkeys(("os.posix_spawn", "os.exec", "os.system", "subprocess.Popen"), _describe_start),
    "socket.connect": "opens a connection",
    "socket.sendto": "sends on a socket",
    "socket.bind": "binds a socket",
    **dict.fromkeys(("socket.getaddrinfo", "socket.gethostbyname"), "looks a host up"),
    "mmap.__new__": lambda fd, *rest: "makes memory that forks share" if fd == -1 else None,
    "resource.setrlimit": "sets a resource limit",
    "sys.settrace": "sets a trace function",
    "sys.setprofile": "sets a profile function",
    "sys.addaudithook": "adds an audit hook",
    **dict.fromkeys(("signal.pthread_kill", "os.kill"), "sends a signal"),
}
"""What is recorded of Python's audit events: a text, or a function of the event's arguments that returns one."""
