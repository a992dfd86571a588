"""Tests that the cells of docs/notebooks.md print what the page shows, in one Jupyter kernel."""

import os
import signal
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from ddplaunch.base.errors import UsageError
from ddplaunch.features.python import notebook_magic
from tests.conftest import clean_environment
from tests.scaled_timeouts import scaled_timeout
from tests.test_readme import CTRL_C, ROOT, blocks, not_printed


def test_another_number_of_ranks_ends_the_session(monkeypatch, capsys):
    """Each cell prints the value of its last expression, unless that is None."""
    calls: list[str] = []

    class Session:
        def __init__(self, nproc: str, **_: bool) -> None:
            self.run = lambda run_cell, *words: (calls.append(f"run {nproc}"), run_cell(*words))
            self.close = lambda: calls.append(f"close {nproc}")

    monkeypatch.setattr(notebook_magic, "Session", Session)
    cells = notebook_magic.CellRanks()
    with pytest.raises(UsageError, match="no ranks have been started yet"):
        cells.run("", "1")
    for line, cell in {"--nproc 2": "x = 'a'\nx", "": "", "--nproc=2": "None", "--nproc 4": "x += 'b'"}.items():
        cells.run(line, cell)
    for line in ("--nproc two", "--nodes 2", "--nproc 2 2"):
        with pytest.raises(UsageError):
            cells.run(line, "1")
    assert calls == ["run 2", "run 2", "run 2", "close 2", "run 4"]
    assert capsys.readouterr().out == "'a'\n"


POISON = """
import os
os.register_at_fork(after_in_child=lambda: os._exit(77))
"""
"""As CUDA does once it is in use: a fork of this process cannot go on."""


BEYOND_THE_PAGE = [
    ("session.run(wait)", ["[0] waiting", "[1] waiting", CTRL_C, "KeyboardInterrupt"]),
    ("session.run(step)", ["LaunchError: the session has ended: create a new one"]),
    ("%%ddplaunch\ntotal +", ["SyntaxError: invalid syntax (3.py, line 1)"]),
    (
        "%%ddplaunch --nproc two\ntotal",
        ["UsageError: --nproc two: expected a number, a list like 8,8,4, or auto, gpu, cpu"],
    ),
    ("%%ddplaunch\ntotal += torch.tensor(1)\nint(total)", ["[0-1] 4"]),
    (
        "%%ddplaunch\nimport time\n\nprint('waiting', flush=True)\ntime.sleep(1000)",
        [
            *("[0-1] waiting", CTRL_C, "[0-1] KeyboardInterrupt: …"),
            "ddplaunch: the ranks have ended; their variables are lost; the next call starts new ones",
        ],
    ),
    ("%%ddplaunch --nproc 3\ntotal", ["[0-2]     total", "[0-2] NameError: name 'total' is not defined"]),
]
"""Cells that the same kernel executes after those of the page, with what they show."""


def cells() -> list[tuple[str, list[str]]]:
    """The page's cells, each with the lines that it shows."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks(ROOT / "docs" / "notebooks.md"):
        if block.language == "python":
            found.append((block.body, []))
        elif block.language == "text":
            found[-1][1].extend(block.body.splitlines())
    return found


def shown(cell: Any) -> str:
    """What a cell shows, as text."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type == "error":
            parts.append(f"{output.ename}: {output.evalue}".rstrip(": ") + "\n")
        else:
            parts.append(output.data["text/plain"] + "\n")
    return "".join(parts)


class Notebook(nbclient.NotebookClient):  # type: ignore[misc]
    """Executes cells; presses the stop button when a cell shows what it has before ``^C``."""

    awaited: list[str] | None = None

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        found = super().process_message(msg, cell, cell_index)
        if self.awaited is not None and not not_printed(self.awaited, shown(cell)):
            self.awaited = None
            os.kill(self.km.provisioner.pid, signal.SIGINT)  # as interrupt_kernel does, which is a coroutine
        return found


@pytest.mark.ci
@pytest.mark.slow
def test_cells_of_the_notebooks_page_print_the_output_on_the_page(tmp_path: Path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    variables = clean_environment({"TMPDIR": str(temporary), "IPYTHONDIR": str(tmp_path / "ipython")})
    page = [*cells(), *BEYOND_THE_PAGE]
    assert sum(CTRL_C in lines for _, lines in page) == 3
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in (POISON, *(c for c, _ in page))])
    notebook = Notebook(book, timeout=int(scaled_timeout(60)), kernel_name="python3", allow_errors=True)
    with notebook.setup_kernel(env=variables, cwd=str(tmp_path)):
        notebook.execute_cell(book.cells[0], 0)
        for number, (_, lines) in enumerate(page, 1):
            if CTRL_C in lines:
                notebook.awaited = lines[: lines.index(CTRL_C)]
            notebook.execute_cell(book.cells[number], number)
            output = shown(book.cells[number])
            missing = not_printed(lines, output)
            assert not missing, f"not shown: {missing[0]}\n{book.cells[number].source}\n{output}"
            assert notebook.awaited is None
    assert not list(temporary.glob("ddplaunch-*"))
