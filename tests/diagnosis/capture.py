"""Runs each hang of ``programs/train.py`` and keeps what its ranks were doing in ``samples``.

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
HANGS, SAMPLES = HERE / "programs", HERE / "samples"
KINDS = (
    "absent",
    "asynchronous",
    "broadcast",
    "chain",
    "circle",
    "coalesced",
    "ddp",
    "fsdp",
    "gil",
    "loader",
    "lock",
    "mismatch",
    "monitored_barrier",
    "no_init",
    "objects",
    "point_to_point",
    "ran_longer",
    "subgroup",
)

PATHS = (
    (f"{HANGS / 'asking.py'}", "/ddplaunch/rank/asking.py"),
    (f"{Path(ddplaunch.__file__).parent}/", "/ddplaunch/"),
    (f"{HANGS}/", "/job/"),
    (sysconfig.get_path("purelib"), "/venv/lib/python3/site-packages"),
    (sysconfig.get_path("stdlib"), f"/usr/lib/python3.{sys.version_info[1]}"),
)


def capture(kind: str) -> None:
    """Run one hang and write its sample: for each rank its stacks, states and entries, or null where it has ended."""
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
            if not (stacks := path.with_suffix(".stacks").read_text()):
                ranks.append(None)
                continue
            for here, there in PATHS:
                stacks = stacks.replace(here, there)
            ranks.append({"stacks": stacks.splitlines(), **_told(path)})
    SAMPLES.mkdir(exist_ok=True)
    (SAMPLES / f"{kind}.json").write_text(json.dumps(ranks, indent=1) + "\n")


def _told(path: Path) -> dict[str, object]:
    """What a rank said of its collectives, the last of its entries; nothing where it could not."""
    if not path.with_suffix(".entries").exists():
        return {}
    states, entries = (json.loads(path.with_suffix(suffix).read_bytes()) for suffix in (".states", ".entries"))
    entries["entries"] = [json.dumps(entry) for entry in entries.get("entries", [])[-4:]]
    return {"states": json.dumps(states), "entries": entries}


if __name__ == "__main__":
    for each in sys.argv[1:] or KINDS:
        capture(each)
