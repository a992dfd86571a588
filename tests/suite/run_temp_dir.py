"""The temporary folder of the test run, and the cleanup process that removes what the run leaves behind."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

MARK = "DDPLAUNCH_TESTS"
"""The variable by which the cleanup process finds processes of the run; its value is the folder."""

_VARIABLES = ("TMPDIR", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", MARK)

_CLEANUP = Path(__file__).with_name("cleanup_process.py")


class RunTempDirPlugin:
    """The plugin of pytest's own process, or of xdist's controller, whose workers inherit the variables."""

    def __init__(self, config: pytest.Config) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="ddplaunch-tests-"))
        self._path.chmod(0o755)  # some tests run a command as another user
        (self._path / "tmp").mkdir()
        self._cleanup = subprocess.Popen(
            [sys.executable, "-IS", str(_CLEANUP), f"{MARK}={self._path}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._before = {name: os.environ.get(name) for name in _VARIABLES}
        os.environ["XDG_STATE_HOME"] = str(self._path / "state")
        os.environ["XDG_CACHE_HOME"] = str(self._path / "cache")
        (self._path / "cache").mkdir()
        (self._path / "cache" / "ddplaunch").touch()  # a file, so that only tests of trials start one
        os.environ.update({"TMPDIR": str(self._path / "tmp"), MARK: str(self._path)})
        set_runtime_dir("run")
        tempfile.tempdir = None
        self._leftovers = ""
        if not config.option.basetemp:  # the user's own folder is kept
            config.option.basetemp = str(self._path / "pytest")

    @pytest.hookimpl(trylast=True)  # once xdist's workers are gone
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._leftovers, _ = self._cleanup.communicate()
        if self._leftovers and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._leftovers.splitlines():
            terminalreporter.write_line(line, red=True)

    def pytest_unconfigure(self) -> None:
        self._cleanup.communicate()
        shutil.rmtree(self._path, ignore_errors=True)
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None


def set_runtime_dir(name: str) -> None:
    """Make a folder of control sockets, so that commands list only the jobs of this process's tests."""
    path = Path(os.environ[MARK], name)
    path.mkdir(mode=0o700, exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(path)


@pytest.hookimpl(tryfirst=True)  # before pytest and xdist make their own
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        set_runtime_dir(config.workerinput["workerid"])
    elif not config.option.collectonly:
        config.pluginmanager.register(RunTempDirPlugin(config), "folder")
