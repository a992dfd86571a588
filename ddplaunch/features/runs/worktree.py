"""A worktree of git with the code of an earlier run: its commit, and its stored changes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess

import click

from ddplaunch.base.errors import LaunchError, UsageError, sanitize_line
from ddplaunch.base.text import join_names
from ddplaunch.features.runs.provenance import SHORT_COMMIT, Provenance
from ddplaunch.system.git_environ import git_environ
from ddplaunch.system.history_dir import history_dir, open_history_dir
from ddplaunch.system.target.source import find_module

GIT_TIMEOUT_S = 600.0  # for a large repository on a network disk


def make_worktree(run: str, provenance: Provenance | None, diff: bytes) -> str:
    """Return the path of a worktree with the code of a run; an earlier one with the same code is used again.

    Raises UsageError if the commit of the run is not known here, or its changes were not stored as a whole.
    """
    git = provenance and provenance.git
    if not git or not git.commit or not re.fullmatch("[0-9a-f]{40,64}", git.commit):
        why = f": {provenance.git_error}" if provenance and provenance.git_error else ""
        raise UsageError(f"the commit of {run} is not recorded{why}", "leave --commit out")
    if git.is_diff_cut:
        what = f"the changes of {run} since its commit were longer than what is stored"
        raise UsageError(what, f"leave --commit out; git checkout {git.commit[:SHORT_COMMIT]} has the commit")
    if not os.path.isdir(git.root):
        raise UsageError(f"the repository of {run} does not exist any more: {sanitize_line(git.root)}")
    changes = f"-{hashlib.sha256(diff).hexdigest()[:8]}" if diff else ""
    base = re.sub(r"(-[0-9a-f]{12}(-[0-9a-f]{8})?)?$", "", os.path.basename(git.root))  # it may be a worktree
    name = re.sub(r"[^\w.-]", "-", base) or "code"
    parent = os.path.join(os.path.dirname(history_dir() or ""), "worktrees")
    path = os.path.join(parent, f"{name}-{git.commit[:SHORT_COMMIT]}{changes}")
    if os.path.isdir(path):
        if _run_git(path, "rev-parse", "HEAD").strip() != git.commit:
            raise UsageError(
                f"{path} is not at commit {git.commit[:SHORT_COMMIT]} any more", f"git worktree remove {path}"
            )
    else:
        os.close(open_history_dir(parent, create=True))
        _run_git(git.root, "worktree", "add", "--detach", path, git.commit)
        try:
            if diff:
                _run_git(path, "apply", "--whitespace=nowarn", "-", stdin=diff)
        except LaunchError:
            _run_git(git.root, "worktree", "remove", "--force", path)
            raise
    if missing := [name for name in git.new if not os.path.exists(os.path.join(path, name))]:
        click.echo(f"ddplaunch: the worktree lacks what git did not track: {join_names(missing)}", err=True)
    click.echo(f"ddplaunch: git worktree remove --force {path} removes the worktree", err=True)
    return path


def path_in_worktree(path: str, root: str, worktree: str) -> str | None:
    """Return where an absolute path is in the worktree; None if neither it nor its real path is in ``root``.

    ``root`` is a real path, as git gives it: a path that was typed may lead there through a symbolic link.
    """
    for each in (path, os.path.realpath(path)):
        inside = os.path.relpath(each, root)
        if inside.split(os.sep)[0] != os.pardir:
            return os.path.normpath(os.path.join(worktree, inside))
    return None


def target_in_worktree(target: str, folder: str, root: str, worktree: str) -> str | None:
    """Return the target in the worktree that matches ``target`` in the earlier folder; None if there is none.

    A relative target stays as it is if the folder is in the repository: it runs in the worktree's folder. So does a
    program that is neither Python nor in this repository.
    """
    file, colon, function = target.partition(":")
    moved = path_in_worktree(os.path.join(folder, file), root, worktree)
    has_folder, is_absolute = path_in_worktree(folder, root, worktree) is not None, os.path.isabs(file)
    if moved is None:
        return target if has_folder and is_absolute and not file.endswith(".py") else None
    if has_folder and not is_absolute:
        return None if _is_in_repository_itself(file, moved, root, worktree) else target
    return f"{moved}{colon}{function}"


def _is_in_repository_itself(name: str, moved: str, root: str, worktree: str) -> bool:
    """Whether Python finds module ``name`` in the repository itself (an editable install), not in the worktree."""
    if os.path.exists(moved) or not all(part.isidentifier() for part in name.split(".")):
        return False
    spec = find_module(name, os.path.dirname(moved))
    origins = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    found = [os.path.realpath(each) for each in origins if each and "site-packages" not in each]
    return any(path_in_worktree(each, root, root) and not path_in_worktree(each, worktree, root) for each in found)


def _run_git(folder: str, *words: str, stdin: bytes = b"") -> str:
    """Run git, and return its output. Raises LaunchError with its last line if it fails."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            env=git_environ(os.environ),
            input=stdin,
            capture_output=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"git {words[0]} failed: {error}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise LaunchError(f"git {words[0]} in {sanitize_line(folder)}: {sanitize_line(lines[-1], 200)}")
    return done.stdout.decode(errors="replace")
