"""Starts the interpreters of an audit (probe.py), and reads their reports."""

import itertools
import marshal
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.tools.preload_audit.probe_report import ProbeReport

REPOSITORY = Path(__file__).resolve().parents[3]
_TIMEOUT_S = 900.0
_STACK_BYTES = 1 << 28  # deeply nested values are read by recursion

_STUB = """import sys
sys.path.pop(0)
HOME = {home!r}
exec(compile(open({probe!r}).read(), {probe!r}, "exec"), {{"__name__": "probe", "HOME": HOME, "sys": sys}})
"""


class ProbeFailed(Exception):
    """An interpreter ended before its report; the message has its last output."""


def make_rank_variables(rank: int) -> dict[str, str]:
    """The variables of a rank of two nodes with eight each, which its zygote has not (``Plan.environment``)."""
    local = rank % 8
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": str(rank // 8),
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": str(rank // 8),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": "16",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29531",
        "TORCHELASTIC_RUN_ID": "audit",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "DDPLAUNCH_DEVICE": f"cpu:{local}",
    }


RANKS = (0, 1, 11)


class ProbeRunner:
    """Runs interpreters in an empty folder; all of one audit run the same copy of the probe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        for name in ("program", "work", "empty"):
            (folder / name).mkdir()
        home = folder / "home"
        for name in ("tests/tools/preload_audit", "ddplaunch/core/rank", "ddplaunch/features/preload/rank"):
            shutil.copytree(REPOSITORY / name, home / name, ignore=shutil.ignore_patterns("__pycache__", "test_*"))
        self._getenv_tracer = folder / "getenv_tracer.so"
        source = Path(__file__).parent / "getenv_tracer.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self._getenv_tracer, source, "-ldl"], check=True)
        for name in ("zygote", "train"):
            text = _STUB.format(home=str(home), probe=str(home / "tests" / "tools" / "preload_audit" / "probe.py"))
            (folder / "program" / f"{name}.py").write_text(text)
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES if hard < 0 else min(_STACK_BYTES, hard), hard))

    def run(
        self,
        kind: str,
        modules: Sequence[str],
        *,
        first: Sequence[str] = ("torch",),
        last: Sequence[str] = (),
        compared: Sequence[str] | None = None,
        ranks: Sequence[int] = (0,),
        perturbations: Sequence[str] = (),
    ) -> ProbeReport:
        """Import modules in one interpreter (``probe.Request`` describes how); ProbeFailed if it fails."""
        number = next(self._numbers)
        request_path, report_path = (self._folder / f"{number}.{name}" for name in ("request", "report"))
        request = {
            "kind": kind,
            "first": list(first),
            "modules": list(modules),
            "last": list(last),
            "compared": None if compared is None else list(compared),
            "ranks": [make_rank_variables(each) for each in ranks],
            "perturbations": list(perturbations),
            "program_folder": str(self._folder / "program"),
            "empty_folder": str(self._folder / "empty"),
            "parent": os.getpid(),
        }
        request_path.write_bytes(marshal.dumps(request))
        stub = self._folder / "program" / f"{'zygote' if kind == 'fork' else 'train'}.py"
        removed = {"PYTHONPATH", "PYTHONHASHSEED", "PYTHONSTARTUP", "LD_PRELOAD", *make_rank_variables(0)}
        environ = {name: value for name, value in os.environ.items() if name not in removed}
        environ |= {"PYTHONHASHSEED": "1", "LD_PRELOAD": str(self._getenv_tracer)}
        output_path = self._folder / f"{number}.output"
        with output_path.open("wb") as output:
            code = subprocess.run(
                [sys.executable, stub, request_path, report_path],
                cwd=self._folder / "work",
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                timeout=_TIMEOUT_S,
            ).returncode
        if code != 0:
            last_output = output_path.read_text(errors="replace")[-1500:].strip()
            raise ProbeFailed(f"{kind}: {_describe_exit(code)}\n{last_output}".strip())
        try:
            return ProbeReport.read_file(report_path)
        except (OSError, ValueError, EOFError, TypeError) as error:
            raise ProbeFailed(f"{kind}: no answer ({type(error).__name__}: {error})") from error


def _describe_exit(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
