"""A submission that came from another machine, ``submit --via``: its request, and how this process submits it."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.base.types import Name, Text, TextLine
from ddplaunch.features.code.archive import CodeArchive
from ddplaunch.system.code_version import CodeVersion
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

HELLO = b"ddplaunch submit "
"""What the login node prints first, before the version of its ddplaunch; start files may have printed before."""

CODE_REQUEST, NO_CODE_REQUEST = b"send code\n", b"send nothing\n"


class SentCode(Struct, frozen=True):
    """Description of the code that follows the request, if the login node has no copy and requests it."""

    version: CodeVersion
    run_folder: TextLine  # in the copy
    packed_bytes: int
    size: int
    text: TextLine  # its sizes and version, as they are shown


class ReceivedCode(CodeArchive, frozen=True, kw_only=True):
    """The code as it was received."""

    sent: SentCode

    def __str__(self) -> str:
        return self.sent.text

    def run_folder(self, cwd: str) -> str:
        return self.sent.run_folder


class RemoteRequest(Struct, frozen=True):
    """The request to submit a job: the first line that the login node gets."""

    words: tuple[Text, ...]  # of ``ddplaunch submit``
    folder: TextLine  # where the job runs and its log is; relative to the user's home there
    mark: Name  # the beginning of the line that has the record of the job
    code: SentCode | None = None


class RemoteSubmission:
    """The submission that this process makes for another machine."""

    def __init__(self, folder: str, code: CodeArchive | None) -> None:
        """``folder``: the folder in which the job runs; the current folder is that of the code."""
        self.folder, self.code = folder, code
        self.job: SubmittedJob | None = None  # once it was submitted


CURRENT: list[RemoteSubmission] = []
"""The submission, if this process makes one for another machine."""
