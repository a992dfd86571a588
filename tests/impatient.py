"""A launcher that waits less long than ours, for tests of what it does when it has waited long enough."""

import sys
from pathlib import Path

from tests.conftest import write_program


def launcher_with_constant(folder: Path, constant: str, seconds: float, *others: str) -> Path:
    """Write the launcher with ``constant``, say "agent.stragglers.STRAGGLING", of so many seconds.

    So are ``others`` of its file.

    The program is for ``subprocess.Popen(command(…), executable=…)``, and so for ``start(…, executable=…)``.
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
