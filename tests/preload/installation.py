"""An interpreter of its own with small distributions of ours, and trials in it: torch there is an empty module."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import ddplaunch
from ddplaunch.preload import verdict
from ddplaunch.preload.question import Question, Setting, Statement
from ddplaunch.preload.verdict import Verdict
from tests.conftest import clean_environment
from tests.patience import patience

_HOME = Path(ddplaunch.__file__).parent.parent


class Installation:
    """A virtual environment without pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", symlinks=True, with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
        self.trials = 0
        self.install("torch", {"torch.py": ""})

    def install(self, name: str, files: Mapping[str, str], *, editable: bool = False) -> Path:
        """Install a distribution of these files, as pip would; return the path of its RECORD."""
        info = self.site / f"{name}-1.0.dist-info"
        written = {**files, f"{info.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"}
        if editable:
            written[f"{info.name}/direct_url.json"] = json.dumps({"url": "file:///src", "dir_info": {"editable": True}})
        lines = [f"{info.name}/RECORD,,"]
        for path, text in written.items():
            file = self.site / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            lines.append(f"{path},sha256={digest},{len(text)}")
        record = info / "RECORD"
        record.write_text("\n".join(lines) + "\n")
        return record

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return clean_environment({"PYTHONPATH": str(_HOME), **(extra or {})})

    def asked(
        self,
        *modules: str,
        settings: Sequence[Setting] = (),
        late: Sequence[str] = (),
        unseen: bool = False,
        seeds_first: bool = True,
    ) -> Path:
        """Write a question into a folder of its own; a module is ``name``, or ``name:what`` to import from it."""
        self.trials += 1
        folder = self.folder / f"trial-{self.trials}"
        folder.mkdir()
        parts = [each.partition(":") for each in ("torch", *modules)]
        statements = tuple(Statement(module, (name,) if name else ()) for module, _, name in parts)
        question = Question(statements, tuple(settings), unseen, tuple(late), seeds_first)
        (folder / "question.json").write_text(json.dumps(asdict(question)))
        return folder

    def command(self, folder: Path) -> list[str]:
        words = [str(folder / "question.json"), str(folder / "verdict.json")]
        return [str(self.python), "-m", "ddplaunch.preload.trial", *words]

    def trial(
        self,
        *modules: str,
        settings: Sequence[Setting] = (),
        late: Sequence[str] = (),
        unseen: bool = False,
        seeds_first: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Verdict:
        """Have a trial find its verdict."""
        folder = self.asked(*modules, settings=settings, late=late, unseen=unseen, seeds_first=seeds_first)
        ended = subprocess.run(
            self.command(folder),
            env=self.environment(env),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience(90),
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert not ended.stderr, ended.stderr
        assert sorted(os.listdir(folder)) == ["question.json", "trial.lock", "verdict.json"]
        found = verdict.read(str(folder / "verdict.json"))
        assert found is not None
        return found


def reasons(found: Verdict) -> dict[str, str]:
    """Why each package is excluded."""
    return {each.name: each.reason for each in found.excluded}
