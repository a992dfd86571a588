"""What the user's own folders hide of installed packages, or add to them."""

from __future__ import annotations

import os
import re
import sys

from ddplaunch.preload.table import entry_points, list_dir, normalize_name

_INFO = re.compile(r"(.+?)(?:-[^-]*)?\.(?:dist|egg)-info")
_CONSOLE_SCRIPTS = frozenset({"console_scripts", "gui_scripts"})  # those for the shell

_NOT_OF_TORCH = re.compile(
    r"bdb|cgi|chunk|cmd|code|codeop|compileall|configparser|crypt|curses|dbm|doctest|fileinput|getopt|graphlib|html|imp"
    r"|mailbox|mimetypes|netrc|optparse|pdb|pipes|pty|readline|resource|sched|shelve|symtable|syslog|this|tkinter|trace"
    r"|tracemalloc|tty|turtle|venv|wave|webbrowser|xml|zoneinfo"
)
"""Modules of Python that torch (2.13) does not load, of those that a program may have one of the same name as."""


class ShadowedPackages:
    """What is in folders that come before those of installed packages, or may."""

    def __init__(self, folders: list[str]) -> None:
        self._modules: dict[str, str] = {}  # paths
        self._distributions: dict[str, str] = {}
        self._plugins: str | None = None
        self._archive = next(filter(os.path.isfile, folders), None)  # a zip, whose modules are not looked at
        for folder in dict.fromkeys(map(os.path.abspath, folders)):
            for entry in list_dir(folder):
                path = os.path.join(folder, entry)
                if found := _INFO.fullmatch(entry):
                    self._distributions.setdefault(normalize_name(found[1]), path)
                    if entry_points(path) - _CONSOLE_SCRIPTS:
                        self._plugins = self._plugins or path
                elif entry.endswith((".py", ".pyc", ".so")) or os.path.isfile(os.path.join(path, "__init__.py")):
                    self._modules.setdefault(entry.partition(".")[0], path)

    def hides_python(self) -> str | None:
        """Name a file that would be imported instead of a module of Python that torch loads."""
        hidden = sorted(sys.stdlib_module_names & self._modules.keys())
        return next((self._modules[name] for name in hidden if not _NOT_OF_TORCH.fullmatch(name)), None)

    def find_shadow(self, stems: set[str], distributions: set[str], *, plugins: bool = True) -> str | None:
        """Name what an import of these top-level modules, of these distributions, would find here instead.

        ``plugins``: it may load those of any distribution.
        """
        for names, paths in ((stems, self._modules), (distributions, self._distributions)):
            if hidden := names & paths.keys():
                return paths[min(hidden)]
        if self._archive:
            return self._archive
        return self._plugins if plugins else None
