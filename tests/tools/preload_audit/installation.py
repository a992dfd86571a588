"""A virtual environment with small distributions for tests, and a torch that is an almost empty module."""

import base64
import hashlib
import json
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import run_command
from tests.tools.preload_audit.packages import TORCH
from tests.tools.preload_audit.probe_runner import REPOSITORY


@dataclass(frozen=True)
class AuditOutput:
    """Exit code and output of an audit."""

    code: int
    entries: Mapping[str, Any]
    stderr: str


class Installation:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", symlinks=True, with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
        self.table = folder / "known.json"
        self.install("torch", {"torch.py": TORCH})

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

    def audit(self, *words: str, env: Mapping[str, str] | None = None) -> AuditOutput:
        """Audit distributions of this installation, with its table."""
        return run_audit(self.python, "--table", str(self.table), *words, env=env)


def run_audit(python: Path, *words: str, env: Mapping[str, str] | None = None) -> AuditOutput:
    """Run ``python -m tests.tools.preload_audit WORDS`` with an interpreter."""
    env = {"PYTHONPATH": str(REPOSITORY), **(env or {})}
    result = run_command([python, "-m", "tests.tools.preload_audit", *words], env=env, timeout=180)
    assert result.returncode in (0, 1), result.stderr
    return AuditOutput(result.returncode, json.loads(result.stdout), result.stderr)
