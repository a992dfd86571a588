"""Runs ``ddplaunch doctor --json`` on a virtual host, and returns its findings."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_environment, ddplaunch_command, wait_until
from tests.scaled_timeouts import scaled_timeout
from tests.tools.virtual_hosts.host import Host

OF_LOAD = ("runnable processes", "multiplies matrices", "of memory is available", "between them runs at", "TMPDIR")
"""What a busy machine that plays several hosts brings about by itself, and a /dev/shm that is TMPDIR too."""


class DoctorCommand:
    """The command on one host."""

    def __init__(
        self, host: Host, folder: Path, *words: str, env: Mapping[str, str] | None = None, far: Sequence[Host] = ()
    ) -> None:
        """``far``: hosts on which it starts something, too."""
        self._hosts = [host, *far]
        self.process = host.type(ddplaunch_command("doctor", *words, "--json"), folder, clean_environment(env))

    def wait_for_line(self, text: str) -> None:
        """Wait for a line of stderr with this text."""
        assert self.process.stderr
        for line in self.process.stderr:
            if text in line:
                return
        pytest.fail(f"it ended without {text!r}: {self.process.wait()}")

    def end(self) -> tuple[int, str, str]:
        """Wait for the end and for its processes; return the exit code, stdout, and the rest of stderr."""
        out, err = self.process.communicate(timeout=scaled_timeout(100))
        left = [host for host in self._hosts if host.alive]
        wait_until(
            lambda: not any(host.find("ddplaunch doctor|commands.doctor") for host in left),
            "the end of what it started",
        )
        return self.process.returncode, out, err

    def read_result(self) -> tuple[int, Any, list[str]]:
        """Wait for the end; return the exit code, the JSON output, and the findings but those about load."""
        code, out, err = self.end()
        assert out, err
        found = json.loads(out)
        result = [f"{each['subject']}: {each['text']}" for each in found["findings"]]
        return code, found, [each for each in result if not any(word in each for word in OF_LOAD)]
