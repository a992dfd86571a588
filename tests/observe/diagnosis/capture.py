"""Runs each hang of ``programs/train.py`` and writes the inspections of its ranks to ``samples``.

Type ``python -m tests.observe.diagnosis.capture [HANG …]``, on a quiet machine,
after a change of a hang or for another torch.
Paths of this machine do not stay in the samples.
"""

import json
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

import ddplaunch
from tests.conftest import ddplaunch_command, run_command

HERE = Path(__file__).parent
HANGS, SAMPLES = HERE / "programs", HERE / "samples"
KINDS = (
    "absent", "asynchronous", "broadcast", "chain", "circle", "coalesced", "ddp", "fsdp", "gil",
    "loader", "lock", "mismatch", "monitored_barrier", "no_init", "objects", "point_to_point", "ran_longer", "subgroup",
)  # fmt: skip

PATHS = (
    (f"{HANGS / 'asking.py'}", "/ddplaunch/rank/asking.py"),
    (f"{Path(ddplaunch.__file__).parent}/", "/ddplaunch/"),
    (f"{HANGS}/", "/job/"),
    (sysconfig.get_path("purelib"), "/venv/lib/python3/site-packages"),
    (sysconfig.get_path("stdlib"), f"/usr/lib/python3.{sys.version_info[1]}"),
)

# What the samples leave out, as stack_parser.py does: threads without other frames, and frames below the program's.
OWN_THREAD = re.compile(r'(?m)^Thread .*\n(  (File "/ddplaunch/|<no Python frame>).*\n)+\n')  # the main one is last
OWN_FRAMES = re.compile(r'(?m)(^  File "/(?!ddplaunch/).*\n)(  File "/ddplaunch/.*\n)+\Z')


def capture(kind: str) -> None:
    """Run one hang and write its sample: for each rank its stacks and its two answers, or null where it has ended."""
    ranks: list[dict[str, object] | None] = []
    with tempfile.TemporaryDirectory() as folder:
        done = run_command(ddplaunch_command("run", "--nproc", "3", "train.py", kind, folder), HANGS)
        for rank in range(3):
            path = Path(folder) / str(rank)
            if not path.with_suffix(".stacks").exists():
                sys.exit(f"{kind}: rank {rank} has not begun:\n{done.stderr}")
            # The first line is that of a timer, which dumps of ddplaunch do not have.
            if not (stacks := path.with_suffix(".stacks").read_text().partition("\n")[2]):
                ranks.append(None)
                continue
            for here, there in PATHS:
                stacks = stacks.replace(here, there)
            stacks = OWN_FRAMES.sub(r"\1", OWN_THREAD.sub("", stacks))
            lines = {name: path.with_suffix(f".{name}") for name in ("states", "entries")}
            fields = {name: _read_fields(line.read_bytes()) for name, line in lines.items() if line.exists()}
            ranks.append({"stacks": stacks.splitlines(), **fields})
    folder_of_torch = SAMPLES / "{}.{}".format(*torch.__version__.split("."))
    folder_of_torch.mkdir(parents=True, exist_ok=True)
    (folder_of_torch / f"{kind}.json").write_text(json.dumps(ranks, indent=1) + "\n")


def _read_fields(line: bytes) -> list[str]:
    """A rank's answer in its parts, of each recorder the last entries."""
    head, traces = line.decode().split("\t")[:3], line.decode().split("\t")[3:]
    for number, text in enumerate(traces):
        trace = json.loads(text)
        if "entries" in trace:
            trace["entries"] = trace["entries"][-4:]
        traces[number] = json.dumps(trace)
    return [*head, *traces]


if __name__ == "__main__":
    for each in sys.argv[1:] or KINDS:
        capture(each)
