"""``--warm``: runs tests as if all runs requested a warm zygote.

Each test has a folder of its own, so it rarely gets the zygote of another test: this tests that runs are unchanged.
"""

import os
import subprocess
import sys
import tempfile

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--warm", action="store_true", help="run all jobs of the tests with DDPLAUNCH_WARM=1")


class WarmPlugin:
    def __init__(self) -> None:
        os.environ["DDPLAUNCH_WARM"] = "1"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="warm-")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        subprocess.run([sys.executable, "-m", "ddplaunch", "warm", "--stop"], capture_output=True, check=False)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.warm:
        config.pluginmanager.register(WarmPlugin(), "warm runs")
