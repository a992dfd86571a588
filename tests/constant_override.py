"""Launchers with shorter timeouts, for tests of what happens when a timeout has expired."""

import sys
from pathlib import Path

from tests.conftest import write_program


def launcher_with_constant(folder: Path, constant: str, seconds: float, *others: str) -> Path:
    """Write a launcher in which ``constant`` is ``seconds``, as "core.net.link.CONNECT_TIMEOUT_S".

    ``others``: more constants of that module, which get the same value.

    The program is for ``subprocess.Popen(command(…), executable=…)``, and so for ``start(…, executable=…)``.
    """
    module, _, name = constant.rpartition(".")
    program = write_program(
        folder,
        "launcher",
        f"""
        #!{sys.executable}
        import sys
        import ddplaunch.{module} as module
        from ddplaunch.cli import main

        for name in {[name, *others]}:
            assert isinstance(getattr(module, name), float)
            setattr(module, name, {seconds})
        del sys.argv[1:3]  # "-m", "ddplaunch"
        main()
        """,
    )
    program.chmod(0o755)
    return program
