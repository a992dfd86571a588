"""Finds modules in the user's own folders that shadow installed packages or the standard library, or add plugins."""

from __future__ import annotations

import os
import re
import sys

from ddplaunch.base.safe_files import list_dir
from ddplaunch.base.text import normalize_name
from ddplaunch.features.preload.known_packages import entry_points

_INFO = re.compile(r"(.+?)(?:-[^-]*)?\.(?:dist|egg)-info")
_SCRIPT_GROUPS = frozenset({"console_scripts", "gui_scripts"})  # entry points that are commands, not plugins

_UNUSED_BY_TORCH = re.compile(
    r"bdb|cgi|chunk|cmd|code|codeop|compileall|configparser|crypt|curses|dbm|doctest|fileinput|getopt|graphlib|html|imp"
    r"|mailbox|mimetypes|netrc|optparse|pdb|pipes|pty|readline|resource|sched|shelve|symtable|syslog|this|tkinter|trace"
    r"|tracemalloc|tty|turtle|venv|wave|webbrowser|xml|zoneinfo"
)
"""Standard modules that torch (2.13) does not load: a file of the user with such a name does no harm."""


class ShadowedPackages:
    """The modules and distributions in ``folders``, which come, or may come, before site-packages on ``sys.path``."""

    def __init__(self, folders: list[str]) -> None:
        self._modules: dict[str, str] = {}  # its path, by top-level name
        self._distributions: dict[str, str] = {}  # the same, by normalized name
        self._plugins: str | None = None  # the first distribution with entry points
        self._archive = next(filter(os.path.isfile, folders), None)  # a zip; its modules are not listed
        for folder in dict.fromkeys(map(os.path.abspath, folders)):
            for entry in list_dir(folder):
                path = os.path.join(folder, entry)
                if match := _INFO.fullmatch(entry):
                    self._distributions.setdefault(normalize_name(match[1]), path)
                    if entry_points(path) - _SCRIPT_GROUPS:
                        self._plugins = self._plugins or path
                elif entry.endswith((".py", ".pyc", ".so")) or os.path.isfile(os.path.join(path, "__init__.py")):
                    self._modules.setdefault(entry.partition(".")[0], path)

    def find_stdlib_shadow(self) -> str | None:
        """Return a file that shadows a standard module which torch loads, or None."""
        shadowed = sorted(sys.stdlib_module_names & self._modules.keys())
        return next((self._modules[name] for name in shadowed if not _UNUSED_BY_TORCH.fullmatch(name)), None)

    def find_shadow(self, tops: set[str], distributions: set[str], *, plugins: bool = True) -> str | None:
        """Return a path that an import would use instead of an installed package, or None.

        Args:
            tops: the top-level modules that it loads.
            distributions: the distributions that they belong to.
            plugins: whether it may load plugins (entry points) of any distribution.
        """
        for names, paths in ((tops, self._modules), (distributions, self._distributions)):
            if shadowed := names & paths.keys():
                return paths[min(shadowed)]
        if self._archive:
            return self._archive
        return self._plugins if plugins else None
