"""The machine of these tests: simulated GPUs, and a folder of its own for locks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml import FakeNvml
from tests.fake_nvml import fake_nvml as fake_nvml


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    """The folder of the locks, which all users may write to."""
    folder = tmp_path / "locks"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def machine(fake_nvml: FakeNvml, locks: Path, state: Path) -> Callable[..., dict[str, str]]:
    """Return the environment of a machine with these GPUs, and what else ``fake_nvml.environ`` takes."""

    def environ(gpus: int = 4, **settings: Any) -> dict[str, str]:
        found = {**fake_nvml.environ(gpus, **settings), "DDPLAUNCH_LOCK_DIR": str(locks)}
        return {**found, "XDG_STATE_HOME": str(state)}

    return environ
