"""NVIDIA GPUs for tests on machines without any: ``fake_nvml.c``, compiled once, and the environment that selects it.

A test takes the fixture ``fake_nvml`` (a conftest imports it from here) and starts real programs in what
``fake_nvml.environ(...)`` returns.
"""

import base64
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.system.plan.hardware import Hardware

ROOT = Path(__file__).parent.parent
H100 = "NVIDIA H100 80GB HBM3"

NOWHERE = Path("/proc/nowhere")
without_gpus = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has an NVIDIA GPU")

DRIVER_NOT_LOADED = 9
LIBRARY_MISMATCH = 18
NO_PERMISSION = 4

MASKS = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)

READ = """
import base64, pathlib, pickle, sys
from ddplaunch.system.devices import read_hardware
sysfs, dev = map(pathlib.Path, sys.argv[1:3])
hardware = read_hardware(processes=sys.argv[3] == "True", sysfs=sysfs, dev=dev)
print(base64.b64encode(pickle.dumps(hardware)).decode())
"""


def clean_environ() -> dict[str, str]:
    """Return this process's environment without anything that chooses GPUs."""
    return {name: value for name, value in os.environ.items() if name not in MASKS and not name.startswith("FAKE_")}


class FakeNvml:
    """A folder with the compiled library in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environ(
        self,
        gpus: int | Sequence[str] = 4,
        *,
        memory_mb: int = 81559,
        cpus: str = "0-7;8-15",
        driver: str = "570.86.15",
        init_error: int = 0,
        lost: int | None = None,
        lost_later: int | None = None,
        unsupported: int | None = None,
        busy: Iterable[tuple[int, int, int]] = (),
        mig: Mapping[int, int] | None = None,
        mig_split: int = 1,
        ailing: str = "",
        links: str = "",
        fabrics: str = "",
    ) -> dict[str, str]:
        """Return a whole environment with these GPUs: their number or their names, and what ails them.

        ``busy`` holds (GPU, process, MiB); ``mig`` maps a GPU in MIG mode to its number of GPU instances, each of which
        has ``mig_split`` compute instances. The rest is as in ``fake_nvml.c``.
        """
        settings = {
            "GPUS": ";".join([H100] * gpus if isinstance(gpus, int) else gpus),
            "MEMORY_MB": memory_mb,
            "CPUS": cpus,
            "DRIVER": driver,
            "INIT_ERROR": init_error,
            "LOST": lost,
            "LOST_LATER": lost_later,
            "UNSUPPORTED": unsupported,
            "BUSY": ",".join(":".join(map(str, process)) for process in busy),
            "MIG": ",".join(f"{gpu}:{instances}" for gpu, instances in (mig or {}).items()),
            "MIG_SPLIT": mig_split,
            "AILING": ailing,
            "LINKS": links,
            "FABRICS": fabrics,
        }
        fakes = {f"FAKE_NVML_{name}": str(value) for name, value in settings.items() if value is not None}
        return {**clean_environ(), "LD_LIBRARY_PATH": str(self.folder), **fakes}

    def read(
        self,
        gpus: int | Sequence[str] = 4,
        *,
        processes: bool = False,
        sysfs: Path = NOWHERE,
        dev: Path = NOWHERE,
        **settings: Any,
    ) -> Hardware:
        """Return what ``read_hardware`` says in a process of its own with these GPUs, and no kernel but a made one."""
        return read_in(self.environ(gpus, **settings), processes=processes, sysfs=sysfs, dev=dev)


def read_in(
    environ: Mapping[str, str], *, processes: bool = False, sysfs: Path = NOWHERE, dev: Path = NOWHERE
) -> Hardware:
    """Return what ``read_hardware`` says in a process of its own: LD_LIBRARY_PATH counts only as one starts."""
    command = [sys.executable, "-c", READ, str(sysfs), str(dev), str(processes)]
    output = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert output.returncode == 0, output.stderr
    hardware = pickle.loads(base64.b64decode(output.stdout))
    assert isinstance(hardware, Hardware)
    return hardware


def compile_library(folder: Path) -> FakeNvml | None:
    """Compile the library into a folder; None where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    source = Path(__file__).with_suffix(".c")
    flags = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *flags, "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True)
    return FakeNvml(folder)


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    """The library, compiled for this session."""
    if (library := compile_library(tmp_path_factory.mktemp("fake_nvml"))) is None:
        pytest.skip("needs Linux and a C compiler")
    return library
