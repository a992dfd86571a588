"""Starts the interpreters of an audit, and reads the result of each."""

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

from tests.preload_audit.probe_report import ProbeReport

HOME = Path(__file__).resolve().parent.parent.parent
_TIMEOUT_S = 900.0
_STACK = 1 << 28  # bytes: what refers to itself is read by functions that call themselves

_NEEDED = frozenset({"PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"})

_STUB = """import sys
sys.path.pop(0)
HOME = {home!r}
exec(compile(open({probe!r}).read(), {probe!r}, "exec"), {{"__name__": "probe", "HOME": HOME, "sys": sys}})
"""


class Failed(Exception):
    """An interpreter did not get to its end; the message has what it printed last."""


def rank(number: int) -> dict[str, str]:
    """What a rank of two nodes with eight each has and its zygote has not (``Plan.environment``)."""
    local = number % 8
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": str(number // 8),
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": str(number // 8),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(number),
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


class Runs:
    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._numbers = itertools.count(1)
        for name in ("program", "work", "empty"):
            (scratch / name).mkdir()
        home = scratch / "home"  # a copy, so that all interpreters of an audit run the same
        for name in ("tests/preload_audit", "ddplaunch/core/rank", "ddplaunch/features/preload/rank"):
            shutil.copytree(HOME / name, home / name, ignore=shutil.ignore_patterns("__pycache__", "test_*"))
        self._getenv_tracer = scratch / "getenv_tracer.so"
        source = Path(__file__).parent / "getenv_tracer.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self._getenv_tracer, source, "-ldl"], check=True)
        for name in ("zygote", "train"):
            text = _STUB.format(home=str(home), probe=str(home / "tests" / "preload_audit" / "probe.py"))
            (scratch / "program" / f"{name}.py").write_text(text)
        _, hard = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK if hard < 0 else min(_STACK, hard), hard))

    def run(
        self,
        kind: str,
        modules: Sequence[str],
        *,
        first: Sequence[str] = ("torch",),
        last: Sequence[str] = (),
        compared: Sequence[str] | None = None,
        ranks: Sequence[int] = (0,),
        perturbation: str = "",
        bare: bool = False,
    ) -> ProbeReport:
        """Have one interpreter import modules; Failed if it ends otherwise than it should.

        ``bare``: no variables are set but those that Python itself and the C library need.
        """
        number = next(self._numbers)
        request, answer = (str(self._scratch / f"{number}.{name}") for name in ("request", "answer"))
        asked = {
            "kind": kind,
            "first": list(first),
            "modules": list(modules),
            "last": list(last),
            "compared": None if compared is None else list(compared),
            "ranks": [rank(each) for each in ranks],
            "perturbation": perturbation,
            "program_folder": str(self._scratch / "program"),
            "empty_folder": str(self._scratch / "empty"),
            "parent": os.getpid(),
        }
        Path(request).write_bytes(marshal.dumps(asked))
        stub = self._scratch / "program" / f"{'zygote' if kind == 'fork' else 'train'}.py"
        ours = {"PYTHONPATH", "PYTHONHASHSEED", "PYTHONSTARTUP", "LD_PRELOAD", *rank(0)}
        kept = _NEEDED if bare else os.environ.keys() - ours
        environ = {name: value for name, value in os.environ.items() if name in kept}
        environ |= {"PYTHONHASHSEED": "1", "LD_PRELOAD": str(self._getenv_tracer)}
        output_file = self._scratch / f"{number}.output"
        with output_file.open("wb") as output:
            code = subprocess.run(
                [sys.executable, str(stub), request, answer],
                cwd=self._scratch / "work",
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                timeout=_TIMEOUT_S,
            ).returncode
        if code != 0:
            shown = output_file.read_text(errors="replace")[-1500:].strip()
            raise Failed(f"{kind}: {_ended(code)}\n{shown}".strip())
        try:
            return ProbeReport.read_file(Path(answer))
        except (OSError, ValueError, EOFError, TypeError) as error:
            raise Failed(f"{kind}: no answer ({type(error).__name__}: {error})") from error


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
