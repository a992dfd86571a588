"""An interpreter with small made-up distributions, where torch is an almost empty module."""

import base64
import hashlib
import json
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import run_command
from tests.preload_audit.probe_runner import REPOSITORY


@dataclass(frozen=True)
class AuditResult:
    """What an audit has printed."""

    code: int
    entries: Mapping[str, Any]
    why: str


class Installation:
    """A virtual environment without pip."""

    def __init__(self, folder: Path, torch: str = "") -> None:
        self.folder = folder
        venv.create(folder / "venv", symlinks=True, with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
        self.table = folder / "known.json"
        self.install("torch", {"torch.py": torch})

    def install(self, name: str, files: Mapping[str, str]) -> None:
        """Install a distribution of these files, as pip would."""
        info = self.site / f"{name}-1.0.dist-info"
        written = {**files, f"{info.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"}
        lines = [f"{info.name}/RECORD,,"]
        for path, text in written.items():
            file = self.site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(text)}")
        (info / "RECORD").write_text("\n".join(lines) + "\n")

    def audit(self, *words: str, timeout: float = 60, env: Mapping[str, str] | None = None) -> AuditResult:
        """Run ``python -m tests.preload_audit WORDS`` to its end."""
        return audit(self.python, "--table", str(self.table), *words, timeout=timeout, env=env)


def audit(python: Path, *words: str, timeout: float = 60, env: Mapping[str, str] | None = None) -> AuditResult:
    """Run the audit with an interpreter and what is installed for it."""
    ended = run_command(
        [python, "-m", "tests.preload_audit", *words],
        env={"PYTHONPATH": str(REPOSITORY), **(env or {})},
        timeout=timeout,
    )
    assert ended.returncode in (0, 1), ended.stderr
    return AuditResult(ended.returncode, json.loads(ended.stdout), ended.stderr)
