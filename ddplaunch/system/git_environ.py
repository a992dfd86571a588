"""The environment of git, for commands on the repository of a given folder."""

from __future__ import annotations

from collections.abc import Mapping

_KEPT = ("GIT_CONFIG", "GIT_SSH", "GIT_ASKPASS")  # prefixes: git's configuration, and how it logs in


def git_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that git sets for hooks: they name a repository and its index."""
    return {name: value for name, value in environ.items() if not name.startswith("GIT_") or name.startswith(_KEPT)}
