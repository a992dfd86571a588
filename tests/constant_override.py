"""Launchers that are changed for a test: with shorter timeouts, or with a part that fails."""

import sys
import textwrap
from pathlib import Path

from tests.conftest import write_program


def write_launcher(folder: Path, statements: str) -> Path:
    """Write a launcher that first executes Python statements.

    The program is for ``subprocess.Popen(command(…), executable=…)``, and so for ``start(…, executable=…)``.
    """
    before = f"#!{sys.executable}\nimport sys\n"
    after = 'from ddplaunch.cli import main\ndel sys.argv[1:3]  # "-m", "ddplaunch"\nmain()\n'
    program = write_program(folder, "launcher.new", f"{before}{textwrap.dedent(statements)}\n{after}")
    program.chmod(0o755)
    # A process that has just been started may still read an earlier one: if it were emptied, that would end with 0.
    return program.rename(folder / "launcher")


def launcher_with_constant(folder: Path, constant: str, seconds: float, *others: str) -> Path:
    """Write a launcher in which ``constant`` is ``seconds``, as "core.net.link.CONNECT_TIMEOUT_S".

    ``others``: more constants of that module, which get the same value.
    """
    module, _, name = constant.rpartition(".")
    return write_launcher(
        folder,
        f"""
        import ddplaunch.{module} as module

        for name in {[name, *others]}:
            assert isinstance(getattr(module, name), float)
            setattr(module, name, {seconds})
        """,
    )
