"""A launcher with another value of a duration constant, for tests of timeouts and delays."""

import sys
from pathlib import Path

from tests.conftest import write_program


def launcher_with_constant(folder: Path, constant: str, seconds: float, *others: str) -> Path:
    """Write a launcher in which ``constant``, for example "agent.stragglers.NAME_DELAY_S", is ``seconds``.

    So are ``others`` of its module. The program is for ``subprocess.Popen(ddplaunch_command(…), executable=…)``, and so
    for ``start_ddplaunch(…, executable=…)``.
    """
    module, _, name = constant.rpartition(".")
    program = write_program(
        folder,
        "impatient",
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
