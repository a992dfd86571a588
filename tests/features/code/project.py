"""A folder with code in a repository of git, as a user has it."""

import subprocess
from pathlib import Path

IDENTITY = ("-c", "user.name=A", "-c", "user.email=a@example.org")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *IDENTITY, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def make_project(folder: Path, files: dict[str, str | bytes], *, ignored: str = "") -> Path:
    """Make a repository with these files, committed; ``ignored``: the lines of .gitignore."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet")
    for name, content in {**files, ".gitignore": ignored}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "first")
    return folder
