"""Measures how soon each hang of ``programs/train.py`` is reported, and whether the right rank is named.

Type ``python -m tests.features.inspect.diagnosis.detection_delay [HANG …]``. What counts are
seconds from the last line of the ranks, which
they print just before they hang.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import clean_environment, ddplaunch_command
from tests.features.inspect.diagnosis.capture import HANGS, KINDS
from tests.features.inspect.diagnosis.test_waits import EXPECTED

ASIDE = {"gil": "native code that holds the GIL for 8 s is over by then", "ran_longer": "two ranks have ended: 30 s"}
JOB_TIMEOUT_S = 90.0  # seconds
BEGIN = "def begin(folder, rank):\n    print('begins', flush=True)\n"


def measure_detection_delay(kind: str) -> tuple[float | None, bool, str]:
    """Return the seconds until a hang is reported (None: never), whether correctly, and the sentence."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train.py", "data.py"):
            shutil.copy(HANGS / name, folder)
        (Path(folder) / "asking.py").write_text(BEGIN)
        words = ddplaunch_command("run", "--nproc", "3", "--timeout", f"{JOB_TIMEOUT_S:g}", "train.py", kind, folder)
        with subprocess.Popen(
            words, cwd=folder, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as job:
            assert job.stdout is not None
            began, report = time.monotonic(), None
            for line in job.stdout:
                if line.endswith("begins\n"):
                    began = time.monotonic()
                if match := re.match("ddplaunch: no progress for .*?: (.*); look closer", line):
                    report = time.monotonic() - began, match[1].startswith(EXPECTED[kind][0]), match[1]
                    job.terminate()
        return report or (None, False, "no report")


if __name__ == "__main__":
    seconds, right = [], 0
    for kind in sys.argv[1:] or [each for each in KINDS if each not in ASIDE]:
        after, is_right, text = measure_detection_delay(kind)
        print(f"{kind:20} {'-' if after is None else f'{after:.1f} s':>7} {'' if is_right else text}", flush=True)
        seconds += [] if after is None else [after]
        right += is_right
    print(
        f"{len(seconds)} reported, {right} correctly, after", ", ".join(f"{each:.1f}" for each in sorted(seconds)), "s"
    )
