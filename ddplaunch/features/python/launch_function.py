"""``launch`` and ``launch_async``: call a function in every rank of a job and return the results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, TypeVar

from ddplaunch.features.python import pickle_files
from ddplaunch.features.python.arguments import check_call
from ddplaunch.features.python.keywords import Keywords
from ddplaunch.features.python.launched_job import LaunchedJob

if TYPE_CHECKING:
    from typing_extensions import Unpack


T = TypeVar("T")


def launch(
    function: Callable[..., T],
    *args: object,
    output: IO[str] | None = None,
    **keywords: Unpack[Keywords],
) -> list[T]:
    """Call a function in every rank of a job, and return the results in order of ranks.

    Args:
        function: any function that cloudpickle supports: of a script or a notebook, a closure; for keyword arguments
            use ``functools.partial``. Parameters named ``rank``, ``world_size``, ``device``, … get the rank's values.
        args: for the other parameters, in order.
        output: a text stream for the ranks' output; default: this process's stdout and stderr.
        keywords: the options of ``ddplaunch run``, by name: ``nproc=4``, ``max_restarts=2``, ``timeout="10m"``.

    Raises:
        RankFailed: a rank failed; the exception that it raised is the ``__cause__``.
        UsageError: the function does not take these arguments, or an option is wrong.
        LaunchError: the function or an argument cannot be pickled; or the job did not start, or was stopped.
        TypeError: a keyword is unknown.
    """
    __tracebackhide__ = True
    job = _prepare(function, args, output, keywords)
    try:
        job.start()
        return _wait_for_results(job)
    except BaseException:
        job.stop()
        raise
    finally:
        job.remove_dir()


async def launch_async(
    function: Callable[..., T],
    *args: object,
    output: IO[str] | None = None,
    **keywords: Unpack[Keywords],
) -> list[T]:
    """Like ``launch``, without blocking the event loop. Cancelling it stops the job."""
    __tracebackhide__ = True
    job = _prepare(function, args, output, keywords)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wait_for_end() -> None:
        job.wait()
        with suppress(RuntimeError):  # Ctrl-C during the stop has closed the loop
            loop.call_soon_threadsafe(ended.set)

    try:
        job.start()
        threading.Thread(target=wait_for_end, name="ddplaunch-end", daemon=True).start()
        try:
            await ended.wait()
        except BaseException:
            stopping = loop.run_in_executor(None, job.stop)
            while not stopping.done():
                with suppress(asyncio.CancelledError):  # a second cancellation must not leave ranks behind
                    await asyncio.shield(stopping)
            raise
        return _wait_for_results(job)
    finally:
        job.remove_dir()


def _prepare(function: Callable[..., Any], args: tuple[Any, ...], output: IO[str] | None, keywords: Any) -> LaunchedJob:
    __tracebackhide__ = True
    check_call(function, args)
    job = LaunchedJob(function, keywords, output)
    try:
        pickle_files.dump_call(function, args, job.path("call.0"))
    except BaseException:
        job.remove_dir()
        raise
    return job


def _wait_for_results(job: LaunchedJob) -> list[Any]:
    __tracebackhide__ = True
    job.wait_for_success(0)
    return job.results(0)
