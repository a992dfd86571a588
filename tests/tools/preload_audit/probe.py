"""Imports modules in an interpreter of an audit, and writes a report of what they did and what they contain.

Run by a stub, as ``STUB REQUEST REPORT``: files of marshal, whose fields are those of ``Request`` and of
``probe_report.ProbeReport``. Standard library only, and no module of ddplaunch's is in ``sys.modules``.

``"plain"`` is what a program would be: the variables of a rank, a perturbation if any, then the imports. ``"fork"`` is
what its ranks would be as forks of the zygote: first the imports without these variables, by the zygote's own code;
then for each rank a fork, its variables, the fixups, and the imports again.
"""

from __future__ import annotations

import ctypes
import gc
import marshal
import os
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Literal, TypedDict

    from ddplaunch.core.rank import atexit_cleanup, preload_runner
    from ddplaunch.features.preload.rank import fork_fixups
    from tests.tools.preload_audit import (
        allowed_differences,
        environment,
        import_stack,
        perturbations,
        process_state,
        readers,
        recorder,
        state,
    )

    class Request(TypedDict):
        kind: Literal["plain", "fork"]
        first: list[str]  # modules that are imported for all ranks in any case: torch
        modules: list[str]  # the audited modules
        last: list[str]  # modules to import after these
        compared: list[str] | None  # the modules of the snapshot; None for all but those that ``first`` imports
        ranks: list[dict[str, str]]  # the environment variables of each rank
        perturbations: list[str]  # keys of PERTURBATIONS
        program_folder: str
        empty_folder: str
        parent: int

else:
    from importlib.util import module_from_spec, spec_from_file_location

    def _load(*path: str) -> Any:
        spec = spec_from_file_location(path[-1], os.path.join(HOME, *path) + ".py")  # noqa: F821
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    allowed_differences, environment, import_stack, perturbations, process_state, readers, recorder, state = (
        _load("tests", "tools", "preload_audit", name)
        for name in (
            *("allowed_differences", "environment", "import_stack", "perturbations", "process_state"),
            *("readers", "recorder", "state"),
        )
    )
    atexit_cleanup, preload_runner = (
        _load("ddplaunch", "core", "rank", name) for name in ("atexit_cleanup", "preload_runner")
    )
    fork_fixups = _load("ddplaunch", "features", "preload", "rank", "fork_fixups")

_PDEATHSIG, _SIGKILL = 1, 9
_SCRIPT = os.path.basename(sys.argv[0])
_ARGUMENTS = [_SCRIPT, "--epochs", "3"]


class Probe:
    """One run of an interpreter: sets up the recorders, imports the modules, and writes the report."""

    def __init__(self, request: Request, report_path: str) -> None:
        self.request, self.report_path = request, report_path
        self.forks = request["kind"] == "fork"
        os.environ.pop("PYTHONHASHSEED", None)  # all have one seed of hashes, which no library is to see
        os.environ.pop("PYTHONPATH", None)
        self.imports = import_stack.ImportStack()
        folders = [request["program_folder"], os.getcwd()]
        self.recorder = recorder.Recorder(self.imports, fork_fixups, allowed_differences, folders)
        self.import_errors: dict[str, str] = {}
        if not self.forks:
            self._set_up_rank(request["ranks"][0])
        self.monitor = process_state.ProcessStateMonitor(
            self.imports, self.recorder, environment, forks=self.forks, exempt=frozenset(request["first"])
        )
        self.recorder.record_shared_memory()
        for _ in environment.take_native_reads():
            pass
        self.recorder.install(environment, ["zygote.py", "3", "{}"] if self.forks else _ARGUMENTS)
        self.imports.install(self.monitor.on_module_start, self.monitor.on_module_end)
        if not self.forks:
            self._trace_main()

    def run(self) -> None:
        if self.forks:
            snapshots = self._run_forks()
        else:
            self._import_first()
            self._import(self.request["modules"] + self.request["last"])
            snapshots = [self._make_snapshot(self._list_compared())]
        self._write_report(snapshots)

    def _run_forks(self) -> list[dict[str, Any]]:
        gc.disable()
        cleanup = atexit_cleanup.AtexitCleanup()
        with cleanup:
            self._import(self.request["first"], self._import_in_zygote)
            self.always_imported = frozenset(sys.modules)
            self._import(self.request["modules"], self._import_in_zygote)
        gc.freeze()
        snapshots = []
        for number, variables in enumerate(self.request["ranks"]):
            parent, path = os.getpid(), f"{self.report_path}.{number}"
            pid = posix.fork()
            if pid == 0:
                try:
                    os.setsid()
                    _die_with(parent)
                    cleanup.disable_in_rank()
                    self._set_up_rank(variables)
                    environment.set_arguments(_ARGUMENTS)
                    self._trace_main()
                    fork_fixups.apply_fixups(sys.modules)
                    gc.enable()
                    self._import(self.request["first"] + self.request["modules"])
                    _write(path, self._make_snapshot(self._list_compared()))
                except BaseException:
                    sys.__excepthook__(*sys.exc_info())
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            with open(path, "rb") as file:
                snapshots.append(marshal.load(file))
        cleanup.run()
        return snapshots

    def _set_up_rank(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)
        sys.path.insert(0, self.request["program_folder"])

    def _trace_main(self) -> None:
        environment.trace_main(os.path.join(self.request["program_folder"], _SCRIPT), self.recorder.on_arguments_read)

    def _import_first(self) -> None:
        """Import what is imported in any case, then act as a program before its other imports."""
        self._import(self.request["first"])
        self.always_imported = frozenset(sys.modules)
        if "tempfile" in sys.modules:  # torch's import asks for the folder only where dill is installed
            sys.modules["tempfile"].__dict__["tempdir"] = None
        if self.request["perturbations"]:
            self.recorder.is_paused = True
            for name in self.request["perturbations"]:
                perturbations.PERTURBATIONS[name](self.request["empty_folder"])
            self.recorder.is_paused = False
            self.monitor.accept_changes()

    def _import(self, names: list[str], import_module: Callable[[str], object] = __import__) -> None:
        for name in names:
            try:
                import_module(name)
            except BaseException as error:
                self.import_errors[name] = f"{type(error).__name__}: {error}"

    def _import_in_zygote(self, name: str) -> None:
        config: Any = {
            "modules": [name],
            "user_modules": [],
            "sys_path_0": self.request["program_folder"],
            "import_environment": {},
            "fallback": [],
        }
        errors = preload_runner.run_preload(config, _make_no_auditor)
        if any(errors) or name not in sys.modules:
            self.import_errors[name] = "it cannot be imported by itself"

    def _list_compared(self) -> list[str]:
        if self.request["compared"] is not None:
            return self.request["compared"]
        return [name for name in list(sys.modules) if name not in self.always_imported and _is_compared(name)]

    def _make_snapshot(self, names: Any) -> dict[str, Any]:
        self.recorder.is_paused = True
        gc.unfreeze()
        gc.collect()
        natives = readers.NativeReaders()
        ignored = allowed_differences.IGNORED_NAMES, allowed_differences.IGNORED_ATTRIBUTES
        hasher = state.StateHasher(*ignored, natives, state.list_shared_generators())
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(1_000_000)
        try:
            modules = hasher.hash_modules([name for name in names if name in sys.modules])
            shared = state.hash_shared_state(state.StateHasher({}, {}, natives), environment.get_variables())
        finally:
            sys.setrecursionlimit(limit)
        self.recorder.is_paused = False
        return {"modules": modules, "shared": shared, "opaque": hasher.opaque, "generators": hasher.generators}

    def _write_report(self, snapshots: list[dict[str, Any]]) -> None:
        files = {}
        for name, module in list(sys.modules.items()):
            space = state.get_namespace(module)
            origin = getattr(space.get("__spec__"), "origin", None)
            files[name] = str(space.get("__file__") or origin or "")
        report = {
            "edges": self.imports.edges,
            "import_errors": self.import_errors,
            "actions": self.recorder.actions,
            "state_changes": self.recorder.state_changes,
            "absent_imports": self.imports.absent_imports,
            "files": files,
            "snapshots": snapshots,
        }
        _write(self.report_path, report)
        os._exit(0)  # without functions that were registered to run at exit


def _write(path: str, content: dict[str, Any]) -> None:
    with open(path, "wb") as file:
        marshal.dump(content, file)


def _is_compared(name: str) -> bool:
    """Whether the content of a module is compared: not of Python's modules, nor of those of Cython itself."""
    top = name.partition(".")[0]
    return not top.startswith("_cython_") and top not in {"__main__", "__mp_main__", *sys.stdlib_module_names}


def _make_no_auditor() -> Any:
    raise NotImplementedError  # the import auditor is for packages that have an entry in the table


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    request_path, report_path = sys.argv[1:]
    with open(request_path, "rb") as file:
        request: Request = marshal.load(file)
    _die_with(request["parent"])
    try:
        Probe(request, report_path).run()
    except BaseException:
        sys.__excepthook__(*sys.exc_info())  # the imports may have set another
        os._exit(1)


main()
