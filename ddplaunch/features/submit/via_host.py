"""The part of ``submit --via`` on the login node: keeps a copy of the code, and runs ``ddplaunch submit``."""

from __future__ import annotations

import json
import os
import sys

from ddplaunch import __version__
from ddplaunch.base.errors import LaunchError, UsageError, host_name
from ddplaunch.base.safe_files import current_folder
from ddplaunch.base.types import as_dict, parse
from ddplaunch.cli import run_command_line
from ddplaunch.features.code import copies
from ddplaunch.features.code.archive import CodeArchive
from ddplaunch.features.submit.code_copies import copies_folder, keep_out_of_git
from ddplaunch.features.submit.remote_submission import (
    CODE_REQUEST,
    CURRENT,
    HELLO,
    NO_CODE_REQUEST,
    ReceivedCode,
    RemoteRequest,
    RemoteSubmission,
)


def main() -> int:
    """Read a request from stdin, submit its job, and print its record. Return the exit code."""
    os.environ.pop("PYTHONSAFEPATH", None)  # it was set for this process, and the job inherits its variables
    _send(HELLO + __version__.encode() + b"\n")
    request = parse(sys.stdin.buffer.readline(), RemoteRequest)
    made = ""
    try:
        folder = _enter_folder(request.folder)
        code, made = _receive_code(request, folder)
    except LaunchError as error:
        print(f"Error: {error.message}", error.hint or "", sep="\n  " if error.hint else "", file=sys.stderr)
        return error.exit_code
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    CURRENT.append(submission := RemoteSubmission(folder, code))
    sys.argv[1:] = ["submit", *request.words]
    exit_code = run_command_line()
    if submission.job:
        _send(f"{request.mark} {json.dumps(as_dict(submission.job))}\n".encode(errors="replace"))
    elif made:
        copies.remove_copy(made)
    return exit_code


def _send(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _enter_folder(name: str) -> str:
    """Make the folder of the job the current one, and return its path."""
    folder = os.path.join(os.path.expanduser("~"), os.path.expanduser(name))
    try:
        os.chdir(folder)
    except OSError as error:
        where = f"{host_name()}: {folder}: {error.strerror}"
        hint = f"--via HOST:FOLDER, a folder that all nodes of the cluster see: mkdir -p {folder}"
        raise UsageError(where, hint) from None
    return current_folder()


def _receive_code(request: RemoteRequest, folder: str) -> tuple[CodeArchive | None, str]:
    """Store the code that is sent, unless there is a copy of it, and change to the folder of the copy.

    Return the code, and the path of the copy if that is new.
    """
    if request.code is None:
        _send(NO_CODE_REQUEST)
        return None, ""
    sent, parent = request.code, copies_folder(folder)
    found, data = copies.find_copy(parent, sent.version.name), b""
    if found:
        _send(NO_CODE_REQUEST)
    else:
        _send(CODE_REQUEST)
        data = sys.stdin.buffer.read(sent.packed_bytes)
        if len(data) < sent.packed_bytes:
            raise copies.CopyError("the connection was lost while the code was sent")
        try:
            copy = copies.make_copy(parent, sent.version.sha, sent.version.name, data)
        except copies.CopyError as error:
            raise copies.CopyError(f"{host_name()}: {error.message}", error.hint) from None
        keep_out_of_git(folder)
    os.chdir(os.path.join(found or copy, sent.run_folder))
    archive = ReceivedCode(data, sent.version, frozenset(), sent.size, by_git=False, sent=sent)
    return archive, "" if found else copy
