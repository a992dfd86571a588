"""Detects, by stat(2) only, whether files have changed since a zygote that waits for a run was loaded from them.

The user's own folders (PYTHONPATH, editable installs) change with every edit. In these a new file counts only if it
shadows a loaded module, or has the name of a module that was not found.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    FileState = tuple[int, int, int, int] | None

_SYSTEM_FILES = (
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/usr/lib/locale/locale-archive"),
    *("/usr/lib/locale", "/etc/timezone"),
    *("/etc/ssl/openssl.cnf", "/etc/ssl/certs", "/etc/ssl/certs/ca-certificates.crt"),
)
_CONFIG_FILES = (
    *("matplotlibrc", "$MATPLOTLIBRC", "$MPLCONFIGDIR", "$XDG_CONFIG_HOME/matplotlib", "~/.config/matplotlib"),
    *("$FSSPEC_CONFIG_DIR", "~/.config/fsspec", "$HF_HOME/accelerate", "$XDG_CACHE_HOME/huggingface/accelerate"),
    "~/.cache/huggingface/accelerate",
)
"""User settings that known packages read during their import; of a folder, the files in it."""
_CLOCK_SLACK_NS = 20_000_000  # file times may be this far behind the clock


class FileDependencies:
    """Context manager around the imports that records which modules are not found; ``record`` then stats all files."""

    def __init__(self, rank_runner: Any) -> None:
        self._rank_runner = rank_runner  # the module core/rank/rank_runner.py, as loaded by the zygote
        self._start_ns = time.time_ns() - _CLOCK_SLACK_NS
        self._missing = set[str]()
        self._states: dict[str, FileState] = {}
        self._user_folders: list[str] = []

    def __enter__(self) -> None:
        sys.meta_path.append(self)

    def __exit__(self, *error: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if path is None:
            self._missing.add(name)

    def record(self, package_dir: str) -> str | None:
        """Record the state of all files; return one that changed during the imports. ``package_dir``: of ddplaunch."""
        homes = [os.path.realpath(each) for each in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
        homes += [sys.modules["site"].USER_SITE] if getattr(sys.modules.get("site"), "USER_SITE", None) else []
        folders = [path for path in sys.path if os.path.isdir(path)]
        installed = [path for path in folders if any(_is_inside(os.path.realpath(path), home) for home in homes)]
        self._user_folders = [path for path in folders if path not in installed]
        paths = {
            *_SYSTEM_FILES,
            *_mapped_files(),
            *_module_files(),
            *sys.path,
            sys.executable,
            os.path.realpath(sys.executable),
        }
        paths |= {os.path.join(sys.prefix, "pyvenv.cfg"), *_list_rank_files(package_dir)}
        for path in map(os.path.expanduser, map(os.path.expandvars, _CONFIG_FILES)):
            paths |= {path, *_list_files(path, ("",))}
        for path in folders:
            paths.update(_list_files(path, (".pth", ".dist-info", ".egg-info", ".egg-link")))
        self._states = {path: _stat(path) for path in paths if path not in self._user_folders}
        for path in self._states:
            if self._has_changed_since_start(path):
                return path
        return None

    def _has_changed_since_start(self, path: str) -> bool:
        try:
            found = os.stat(path)
        except OSError:
            return False
        return not os.path.isdir(path) and found.st_ctime_ns >= self._start_ns

    def find_changed(self) -> str | None:
        """Return a file that has changed, or a new one that an import would find now; None if there is none."""
        for path, found in self._states.items():
            if _stat(path) != found:
                return path
        for folder in self._user_folders:
            for name in self._rank_runner.list_importable(folder):
                loaded = sys.modules.get(name)
                if name in self._missing or (loaded is not None and self._shadows(folder, loaded)):
                    return os.path.join(folder, name)
        return None

    def _shadows(self, folder: str, module: Any) -> bool:
        """Whether ``folder`` comes before the module's own folder in sys.path."""
        for entry in sys.path:
            if self._rank_runner.is_loaded_from(module, entry):
                return False
            if entry == folder:
                return True
        return False


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _stat(path: str) -> FileState:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _list_files(folder: str, ends: tuple[str, ...]) -> Iterator[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    yield from (os.path.join(folder, name) for name in names if name.endswith(ends))


def _list_rank_files(package_dir: str) -> Iterator[str]:
    """The files of ddplaunch that run in zygotes and ranks."""
    yield os.path.join(package_dir, "system", "processes", "proc_utils.py")
    yield from _list_files(os.path.join(package_dir, "core", "rank"), (".py",))
    features = os.path.join(package_dir, "features")
    for name in os.listdir(features):
        yield from _list_files(os.path.join(features, name, "rank"), (".py",))


def _module_files() -> Iterator[str]:
    """The files of all modules, and the folders of all packages."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        path = names.get("__file__")
        if isinstance(path, str) and os.path.isabs(path):
            yield path
            if "__path__" in names:
                yield os.path.dirname(path)


def _mapped_files() -> Iterator[str]:
    """The files mapped into this process's memory, mostly shared objects."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            path = line.rstrip("\n").split(maxsplit=5)[5:]
            if path and path[0].startswith("/") and not path[0].startswith(("/dev/", "/memfd:", "/SYSV")):
                yield path[0]
