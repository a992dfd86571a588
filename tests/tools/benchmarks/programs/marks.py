"""Marks with a time that measured programs send to the benchmark through a named pipe; and a place to wait.

Standard library only, and nothing that costs time: every rank imports this first.
"""

import os
import time

REPORT = "BENCH_REPORT"  # the pipe that marks go into
RELEASE = "BENCH_RELEASE"  # a pipe that ends when the benchmark lets the ranks go, or is gone itself
HOLD = "BENCH_HOLD"  # set where the ranks are to wait for that


def mark(what: str) -> None:
    """Report that this rank is at ``what`` now; one write below PIPE_BUF, so lines of several ranks do not mix."""
    now = time.monotonic()  # CLOCK_MONOTONIC is the same for all processes of a machine
    rank = os.environ.get("RANK", "0")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    pipe = os.open(os.environ[REPORT], os.O_WRONLY | os.O_NONBLOCK)  # fails where the benchmark is gone
    os.write(pipe, f"{what} {rank} {attempt} {os.getpid()} {now!r}\n".encode())
    os.close(pipe)


def hold() -> None:
    """Sleep in the kernel, without a single wake-up, until the benchmark closes the other end of the pipe."""
    if os.environ.get(HOLD):
        mark("held")
        pipe = os.open(os.environ[RELEASE], os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(pipe, True)
        os.read(pipe, 1)
        os.close(pipe)
