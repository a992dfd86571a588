"""The launchers that are compared: the command by which each starts N ranks of a program."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"

Words = list[str]
Launcher = Callable[[int, str], Words]
"""Takes a number of ranks and a program's name in PROGRAMS; gives the command line."""


def _installed(name: str, module: str) -> Words:
    """The command beside this interpreter, or its module where it was installed without."""
    found = shutil.which(name, path=os.path.dirname(sys.executable))
    return [found] if found else [sys.executable, "-m", module]


def ddplaunch(*options: str) -> Launcher:
    def words(ranks: int, program: str) -> Words:
        return [*_installed("ddplaunch", "ddplaunch"), "run", "--nproc", str(ranks), *options, str(PROGRAMS / program)]

    return words


def torchrun(*options: str) -> Launcher:
    def words(ranks: int, program: str) -> Words:
        command = _installed("torchrun", "torch.distributed.run")
        return [*command, "--standalone", f"--nproc-per-node={ranks}", *options, str(PROGRAMS / program)]

    return words


def spawn(ranks: int, program: str) -> Words:
    """torch.multiprocessing.spawn."""
    return [sys.executable, str(PROGRAMS / "start_by_spawn.py"), str(ranks), str(PROGRAMS / program)]


LAUNCHERS = {"ddplaunch": ddplaunch(), "torchrun": torchrun(), "mp.spawn": spawn}
"""Each with its ordinary options."""


def python(code: str) -> Words:
    return [sys.executable, "-c", code]


def plain(program: str) -> Words:
    """One process of plain python."""
    return [sys.executable, str(PROGRAMS / program)]


_OTHERS = ("BENCH_", "TORCHELASTIC_", "DDPLAUNCH_", "OMP_", "MKL_", "OPENBLAS_", "GLOO_", "NCCL_", "SLURM_", "PMI")
_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"}
_NAMES |= {"MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED", "PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE"}
_NAMES |= {"HF_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"}  # a job's home is empty
_NAMES |= {"PYTHONDONTWRITEBYTECODE"}  # what pip installs is compiled; a source tree is after the warm-up


def environment() -> dict[str, str]:
    """Our own variables without those that would change what any contender does."""
    return {name: value for name, value in os.environ.items() if name not in _NAMES and not name.startswith(_OTHERS)}
