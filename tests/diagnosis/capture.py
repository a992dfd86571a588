"""Runs each hang of ``hangs/train.py`` and keeps what its ranks were doing in ``samples``.

Type ``python -m tests.diagnosis.capture [HANG …]``, on a quiet machine, after a change of a hang or for another torch.
Paths of this machine do not stay in the samples.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import ddplaunch
from tests.conftest import clean_environment, command

HERE = Path(__file__).parent
HANGS, SAMPLES = HERE / "hangs", HERE / "samples"
KINDS = (
    "absent asynchronous broadcast chain circle coalesced ddp fsdp gil loader lock mismatch monitored_barrier no_init "
    "objects point_to_point ran_longer subgroup"
).split()

PATHS = (
    (f"{HANGS / 'asking.py'}", "/ddplaunch/rank/asking.py"),
    (f"{Path(ddplaunch.__file__).parent}/", "/ddplaunch/"),
    (f"{HANGS}/", "/job/"),
    (sysconfig.get_path("purelib"), "/venv/lib/python3/site-packages"),
    (sysconfig.get_path("stdlib"), f"/usr/lib/python3.{sys.version_info[1]}"),
)


def capture(kind: str) -> None:
    """Run one hang and write its sample: for each rank its stacks, states and entries, or null where it had ended."""
    ranks: list[dict[str, object] | None] = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            command("run", "--nproc", "3", "train.py", kind, folder),
            cwd=HANGS,
            env=clean_environment(),
            capture_output=True,
            check=False,
        )
        for rank in range(3):
            path = Path(folder) / str(rank)
            if not path.with_suffix(".states").exists():
                ranks.append(None)
                continue
            stacks = path.with_suffix(".stacks").read_text()
            for here, there in PATHS:
                stacks = stacks.replace(here, there)
            found = {name: json.loads(path.with_suffix(f".{name}").read_bytes()) for name in ("states", "entries")}
            found["entries"]["entries"] = found["entries"]["entries"][-6:]
            ranks.append({"stacks": stacks.splitlines(), **found})
    SAMPLES.mkdir(exist_ok=True)
    (SAMPLES / f"{kind}.json").write_text(json.dumps(ranks, indent=1) + "\n")


if __name__ == "__main__":
    for each in sys.argv[1:] or KINDS:
        capture(each)
