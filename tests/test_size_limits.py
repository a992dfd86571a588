"""Tests of the form of the package: lengths of files and functions, and which imports are inside functions."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import ddplaunch

PACKAGE = Path(ddplaunch.__file__).parent

LONGEST_FILE, LONGEST_FUNCTION = 500, 75
"""Lines: what can be read at once, and what is seen at once."""

IMPORTED_ON_USE = {"torch", "IPython", "submitit", "jinja2", "psutil", "ctypes", "tempfile", "importlib"}
"""Not every environment has these, or most runs do without, and they cost milliseconds."""

LATE_IMPORTS = {
    "cli/__init__.py": "--version and a signal in the first milliseconds need no click",
    "cli/click_commands.py": "rich, for a page in a terminal",
    "cli/dry_run.py": "rich, for a table in a terminal",
    "cli/pasted/pasted_line.py": "torchrun's options, only for a line of torchrun",
    "cli/run_command.py": "what only a job needs, not a dry run",
    "cli/target_args.py": "lines of other launchers, which few type",
    "features/debug/node.py": "the debugger, at the first breakpoint",
    "features/devices/command.py": "rich, for a table in a terminal",
    "features/nccl/job.py": "what is needed when a job stalls",
    "features/nccl/node.py": "what is needed when a job stalls",
    "features/python/pytest_plugin.py": "pytest loads it in every run of tests where ddplaunch is installed",
    "features/runs/report.py": "what compares several runs, with the options of run",
    "features/runs/provenance_probe.py": "subprocess, only in a repository of git",
    "features/ssh/remote_launcher.py": "tar archives, only with --code",
    "system/target/argument_parser.py": "argparse, for a function that takes a Namespace",
    "system/target/arguments.py": "only for a target with arguments",
}
"""Files with imports of ours inside functions, besides the hooks of features and folders ``rank/``: why."""

FILES = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (name, node)
        for name, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def imported(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The first names of the modules that a function imports: "ddplaunch", "torch"."""
    for node in ast.walk(function):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_every_file_can_be_read_at_once():
    counts = {name: text.count("\n") for name, text in FILES.items()}
    assert {name: count for name, count in counts.items() if count > LONGEST_FILE} == {}


def test_every_function_is_seen_at_once():
    counts = {f"{name}: {node.name}": (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert {name: count for name, count in counts.items() if count > LONGEST_FUNCTION} == {}


def test_imports_stand_at_the_top():
    found = {
        name
        for name, function in functions()
        if not (name.endswith("/feature.py") or "/rank/" in name) and set(imported(function)) - IMPORTED_ON_USE
    }
    assert found == {*LATE_IMPORTS}
