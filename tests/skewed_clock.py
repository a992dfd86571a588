"""A library for ``LD_PRELOAD`` that shifts the clock which a program sees."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    const char *ahead = getenv("CLOCK_AHEAD");
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME && ahead)
        now->tv_sec += atoi(ahead);
    return failed;
}
"""


def skewed_environment(folder: Path, seconds: int) -> dict[str, str]:
    """Return the variables of a program whose clock is ``seconds`` ahead, and of all that it starts."""
    if shutil.which("cc") is None:
        pytest.skip("NO C COMPILER HERE: apt-get install gcc")
    library = folder / "skewed_clock.so"
    words = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-o", str(library), "-"]
    subprocess.run(words, input=SOURCE, text=True, check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(seconds)}
