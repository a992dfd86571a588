"""Copies of the code of submitted jobs: ``--code``. They lie in the folder of the job, which all nodes see."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import click
from msgspec.structs import replace

from ddplaunch.base.errors import LaunchError
from ddplaunch.base.options import OptionSource, value_source
from ddplaunch.base.text import join_names
from ddplaunch.cli.lookup.queued_jobs import list_ended
from ddplaunch.cli.lookup.remote_jobs import RunLocator
from ddplaunch.features.code import copies
from ddplaunch.features.code.archive import CodeArchive, check_log_dir, pack_folder
from ddplaunch.features.code.code_files import OWN_FOLDER
from ddplaunch.features.submit.batch_command import parsed_line
from ddplaunch.features.submit.batch_job import BatchJob, JobCode
from ddplaunch.features.submit.remote_submission import CURRENT
from ddplaunch.system.schedulers import submitted_jobs
from ddplaunch.system.target.target import Target

NO_CODE = "none"
"""The value of --code that copies nothing, even if a file of defaults names a folder."""


def read_code(ctx: click.Context, chdir: str, target: Target | None) -> CodeArchive | None:
    """Pack the folder of --code; None for none. In a file of defaults, a relative path starts at that file's folder.

    ``chdir``: the folder of this machine that the job is to run in.
    Raises UsageError if the job would not run from the copy.
    """
    if CURRENT:  # the machine that submits has read the code
        return CURRENT[0].code
    text = ctx.params["code"]
    if text in (None, NO_CODE):
        return None
    folder = os.path.expanduser(text)
    if value_source(ctx, "code") is OptionSource.FILE:
        folder = os.path.join(os.path.dirname(parsed_line(ctx).defaults.values["code"].file), folder)
    check_log_dir(ctx.params["log_dir"])
    archive = pack_folder(folder)
    archive.run_folder(chdir)
    if target:
        archive.check_target(target.source or target.path, target.text)
    return archive


def plan_copy(job: BatchJob, archive: CodeArchive) -> BatchJob:
    """Return the job with the copy that it will run, if no program has changed it by then."""
    folder = copies_folder(job.chdir)
    found = copies.find_copy(folder, archive.version.name)
    return _with_copy(job, archive, found or os.path.join(folder, archive.version.name))


@contextmanager
def copy_for_submission(job: BatchJob, archive: CodeArchive) -> Iterator[BatchJob]:
    """Copy the code unless a copy is there, and yield the job that runs it; remove a new copy if the job is rejected.

    Raises CopyError.
    """
    folder = copies_folder(job.chdir)
    had_copy = copies.find_copy(folder, archive.version.name) is not None
    made = copies.make_copy(folder, archive.version.sha, archive.version.name, archive.data)
    keep_out_of_git(job.chdir)
    try:
        yield _with_copy(job, archive, made)
    except LaunchError:
        if not had_copy:
            copies.remove_copy(made)
        raise


def copies_folder(chdir: str) -> str:
    """Return the folder of the copies of jobs that run in ``chdir``."""
    return os.path.join(chdir, OWN_FOLDER, "code")


def keep_out_of_git(chdir: str) -> None:
    """Make git ignore the code copies in the folder ``chdir``."""
    with suppress(OSError), open(os.path.join(chdir, OWN_FOLDER, ".gitignore"), "x") as file:
        file.write("*\n")


def _with_copy(job: BatchJob, archive: CodeArchive, copy: str) -> BatchJob:
    run_folder = os.path.normpath(os.path.join(copy, archive.run_folder(job.chdir)))
    return replace(job, code=JobCode(copy, run_folder, archive.version))


class CodeCopyLocator(RunLocator):
    """Removes the copies of jobs that have ended."""

    def remove_leftovers(self, started_before: float, *, dry_run: bool) -> Iterator[str]:
        jobs = [job for job in submitted_jobs.list_jobs() if job.code_copy and os.path.isdir(job.code_copy)]
        ended = list_ended(jobs, time.time())
        used = {job.code_copy for job in jobs if job not in ended or job.moment >= started_before}
        for copy in sorted({job.code_copy for job in jobs if job.code_copy} - used):
            if written := copies.written_files(copy) if dry_run else copies.remove_copy(copy):
                yield f"kept: {copy}, where programs have written {join_names(written)}"
            else:
                yield f"{'copy of code' if dry_run else 'removed'}: {copy}"


LOCATOR = CodeCopyLocator()
