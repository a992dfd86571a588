"""The process that writes the provenance of a run: versions, packages, variables, commit. Standard library only.

The launcher starts it when the ranks run: git may be slow, or hang on a network disk. It writes NAME.json twice, first
without git, and NAME.diff. SIGTERM, the end of the launcher or ``GIT_TIMEOUT_S`` end git, and the file says so.

    python -I -S provenance_probe.py FOLDER NAME REQUEST

REQUEST is a JSON object: fields that are written unchanged, ``sys_path``, and ``folders``, of which the first in a
repository counts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

GIT_TIMEOUT_S = 20.0  # for all its commands
POLL_S = 0.2  # between two checks whether the launcher still lives
NICENESS = 10  # the program's own imports come first
MAX_DIFF = 1 << 20  # bytes
MAX_LIST = 1 << 20  # bytes of a list of files
MAX_FILES = 200  # named, and as many new ones in the diff
MAX_PACKAGES = 5000
MAX_VARIABLES = 500

USUAL_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|TERM|LANG|LANGUAGE|LC_\w+|TZ|HOSTNAME|MAIL|DISPLAY|EDITOR|VISUAL"
    r"|PAGER|LESS\w*|LS_COLORS|COLORTERM|COLUMNS|LINES|TERM_PROGRAM\w*|TMUX\w*|STY|WINDOW\w*|VTE_VERSION|XAUTHORITY"
    r"|DESKTOP_SESSION|SESSION_MANAGER|BASH_FUNC_.*|(XDG|DBUS|SSH|VSCODE|GNOME|KDE|GTK|QT|GPG|KONSOLE|WAYLAND|HIST|SUDO)_\w+"
)
"""Variables of login, terminal and desktop."""

# Files that git may track, and whose content must not be stored.
SECRET_FILES = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_ed25519*",
    "*credential*",
    "*secret*",
    ".netrc",
    ".pypirc",
)

GIT = ("git", "--no-pager", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=true")
DIFF = (
    "diff",
    "HEAD",
    "--binary",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--ignore-submodules=dirty",
    "--",
    ":/",
)


KEPT = ("GIT_CONFIG", "GIT_SSH", "GIT_ASKPASS")  # as in system/git_environ.py, which this program cannot import


def git_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that a hook of git sets: they name a repository and its index."""
    return {name: value for name, value in environ.items() if not name.startswith("GIT_") or name.startswith(KEPT)}


class GitFailed(Exception):
    """Raised when git is missing, takes too long, or refuses the command."""


class GitRunner:
    """Runs git commands in one folder, until a deadline."""

    def __init__(self, folder: str, deadline: float, parent: int) -> None:
        self._folder, self._deadline, self._parent = folder, deadline, parent

    def run(self, *words: str, limit: int = MAX_LIST) -> tuple[bytes, bool]:
        """Run git; return its output, and whether the output was cut off; raise GitFailed."""
        import selectors  # slow to import, and only needed in a repository
        import subprocess

        variables = {**git_environ(os.environ), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        try:
            child = subprocess.Popen(
                [*GIT, *words],
                cwd=self._folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise GitFailed("git is not installed" if error.filename == "git" else f"git: {error.strerror}") from None
        assert child.stdout
        assert child.stderr
        output, errors = bytearray(), bytearray()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ, output)
                selector.register(child.stderr, selectors.EVENT_READ, errors)
                while selector.get_map() and len(output) <= limit:
                    if os.getppid() != self._parent:
                        raise GitFailed("git had not answered when the launcher died")
                    if time.monotonic() > self._deadline:
                        raise GitFailed(f"git did not answer in {GIT_TIMEOUT_S:g} s")
                    for key, _ in selector.select(POLL_S):
                        data = os.read(key.fd, 1 << 16)
                        key.data.extend(data)
                        if not data:
                            selector.unregister(key.fd)
            if len(output) > limit:
                return bytes(output[:limit]), True
            if child.wait():
                lines = errors.decode(errors="replace").strip().splitlines() or ["git failed"]
                raise GitFailed(lines[0][:300])
            return bytes(output), False
        finally:
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # it cannot be killed while a network disk does not answer
                child.wait(POLL_S)  # else a zombie is left where PID 1 reaps none
            child.stdout.close()
            child.stderr.close()


def stop(number: int, frame: FrameType | None) -> None:
    raise GitFailed("git had not answered when the run ended")


def read_git(
    folders: Sequence[str], deadline: float, parent: int, write_diff: Callable[[bytes], None]
) -> dict[str, object] | None:
    """Return what git knows of the first of these folders that is in a repository; None if none is."""
    for folder in folders:
        if may_be_in_repository(folder):
            git = GitRunner(folder, deadline, parent)
            try:
                root = os.fsdecode(git.run("rev-parse", "--show-toplevel")[0]).rstrip("\n")
            except GitFailed as error:
                if "not a git repository" in str(error):
                    continue
                raise
            return read_repository(git, root, write_diff)
    return None


def may_be_in_repository(folder: str) -> bool:
    """Return whether this folder or one above it has a .git; git itself takes longer to find that there is none."""
    while not os.path.lexists(os.path.join(folder, ".git")):
        above = os.path.dirname(folder)
        if above == folder:
            return False
        folder = above
    return True


def read_repository(git: GitRunner, root: str, write_diff: Callable[[bytes], None]) -> dict[str, object]:
    """Return commit, branch and changed files; ``write_diff`` gets the changes."""
    branch, commit = "", None
    changed, new = list[str](), list[str]()
    listed = git.run("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--ignore-submodules=dirty")[0]
    for line in os.fsdecode(listed).split("\0"):
        kind, _, rest = line.partition(" ")
        if line.startswith("# branch.oid ") and not line.endswith("(initial)"):
            commit = line.rpartition(" ")[2]
        elif line.startswith("# branch.head "):
            branch = line.partition("# branch.head ")[2]
        elif kind == "?":
            new.append(rest)
        elif kind in ("1", "u"):
            changed.append(rest.split(" ", 7 if kind == "1" else 9)[-1])
    diff, cut = b"", False
    if commit and (changed or new):
        excluded = [f":(exclude,icase,glob)**/{name}" for name in SECRET_FILES]
        diff, cut = git.run(*DIFF, *excluded, limit=MAX_DIFF) if changed else (b"", False)
        if new:
            names = git.run(
                "ls-files", "-z", "--others", "--exclude-standard", "--full-name", "--", ":/*.py", *excluded
            )[0]
            for name in names.split(b"\0")[:MAX_FILES]:
                if name and not cut and b"site-packages" not in name:
                    diff += new_file_diff(root, name)
                    cut = len(diff) > MAX_DIFF
    if cut:
        diff = diff[: diff.rfind(b"\n", 0, MAX_DIFF) + 1]
    if diff:
        write_diff(diff)
    return {
        "root": root,
        "commit": commit,
        "branch": branch,
        "changed": changed[:MAX_FILES],
        "new": new[:MAX_FILES],
        "diff_bytes": len(diff),
        "is_diff_cut": cut,
    }


def new_file_diff(root: str, name: bytes) -> bytes:
    """Return the diff that adds a file, as `git apply` takes it; nothing for a file that is not text."""
    try:
        path = os.path.join(os.fsencode(root), name)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            content = file.read(MAX_DIFF + 1)
    except OSError:
        return b""
    if not content or b"\0" in content or not re.fullmatch(rb"[\w./ +@=,~-]+", name):
        return b""
    lines = content.split(b"\n")
    is_torn = lines[-1] != b""
    lines = lines if is_torn else lines[:-1]
    head = b"diff --git a/%s b/%s\nnew file mode 100644\n--- /dev/null\n+++ b/%s\n@@ -0,0 +1,%d @@\n"
    body = b"".join(b"+" + line + b"\n" for line in lines) + (b"\\ No newline at end of file\n" if is_torn else b"")
    return head % (name, name, name + (b"\t" if b" " in name else b""), len(lines)) + body


def list_packages(sys_path: Sequence[str]) -> dict[str, str]:
    """Read the versions of installed distributions from their folders' names, as ``importlib.metadata`` finds them."""
    versions = dict[str, str]()
    for folder in sys_path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                project, _, version = name.rpartition(".")[0].partition("-")
                versions.setdefault(project.replace("_", "-").lower(), re.sub(r"-py\d.*", "", version))
    return dict(list(versions.items())[:MAX_PACKAGES])


def read_torch_versions(sys_path: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the versions of torch and of its CUDA or ROCm, from its file ``version.py``."""
    for folder in sys_path:
        try:
            with open(os.path.join(folder, "torch", "version.py"), encoding="utf-8") as file:
                text = file.read(1 << 16)
        except (OSError, UnicodeDecodeError):
            continue
        names = ("__version__", "cuda", "hip")
        found = [re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]*)['\"]", text, re.MULTILINE) for name in names]
        torch, cuda, hip = (match and match[1] for match in found)
        return torch, cuda or hip
    return None, None


def read_driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module; None without one."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            match = re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)", file.read(4096))
    except (OSError, UnicodeDecodeError):
        return None
    return match and match[1]


def list_variables(names: Iterable[str]) -> list[str]:
    """List the names of variables, without those of login, terminal and desktop; values may be secrets."""
    return sorted(name for name in names if not USUAL_VARIABLES.fullmatch(name))[:MAX_VARIABLES]


def main() -> None:
    parent = os.getppid()
    os.nice(NICENESS)
    folder, name, request = sys.argv[1:]
    fields = json.loads(request)
    sys_path, folders = fields.pop("sys_path"), fields.pop("folders")
    torch, cuda = read_torch_versions(sys_path)
    fields |= {
        "python": sys.version.partition(" ")[0],
        "torch": torch,
        "cuda": cuda,
        "driver": read_driver_version(),
        "packages": list_packages(sys_path),
        "variables": list_variables(os.environ),
        "git": None,
        "git_error": "git had not answered when the run ended",
    }

    def write_file(suffix: str, data: bytes) -> None:
        path = os.path.join(folder, name + suffix)
        with open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(data)
        os.replace(f"{path}.new", path)

    write_file(".json", json.dumps(fields).encode())
    fields["git_error"] = None
    try:
        signal.signal(signal.SIGTERM, stop)
        deadline = time.monotonic() + GIT_TIMEOUT_S
        fields["git"] = read_git(folders, deadline, parent, lambda diff: write_file(".diff", diff))
    except GitFailed as error:
        fields["git_error"] = str(error)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing is left to stop
    write_file(".json", json.dumps(fields).encode())


if __name__ == "__main__":
    main()
