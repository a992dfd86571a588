"""The notebook magic ``%%ddplaunch --nproc 4``: runs a cell in every rank of a session that persists between cells."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ddplaunch.base.errors import UsageError
from ddplaunch.features.python.rank.notebook_cell import run_cell
from ddplaunch.features.python.session import Session
from ddplaunch.system.plan.rank_layout import parse_nproc


class CellRanks:
    """The session whose ranks run a notebook's cells."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._nproc = ""
        self._cells = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ddplaunch-cells-")  # tracebacks show lines of files

    def run(self, line: str, cell: str) -> None:
        """Run the cell in every rank: %%ddplaunch --nproc 4; without --nproc in the ranks of the last cell."""
        words = line.replace("=", " ").split()
        if words and (len(words) != 2 or words[0] != "--nproc"):
            raise UsageError(f"%%ddplaunch takes only --nproc N, not {line.strip()}", "use Session() for more")
        nproc = words[1] if words else self._nproc
        if not nproc:
            raise UsageError("no ranks have been started yet", "type: %%ddplaunch --nproc 2")
        parse_nproc(nproc, 1, gpus=1, physical_cpus=1)  # an invalid value must not end the current ranks
        self._cells += 1
        path = Path(self._folder.name, f"{self._cells}.py")
        path.write_text(cell, encoding="utf-8")
        compile(cell, path, "exec", dont_inherit=True)
        if self._session is None or nproc != self._nproc:
            former, self._session = self._session, None  # first, as Ctrl-C may interrupt the rest
            if former is not None:
                former.close()
            self._session, self._nproc = Session(nproc=nproc, merge=True, restart=True), nproc
        self._session.run(run_cell, cell, str(path))


def load_ipython_extension(shell: Any) -> None:
    """Register the magic, for ``%load_ext ddplaunch``."""
    shell.register_magic_function(CellRanks().run, "cell", "ddplaunch")
