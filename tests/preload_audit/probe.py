"""Imports modules in an interpreter of an audit, and reports what it saw: one half of a comparison.

Run by a stub, as ``STUB REQUEST ANSWER``: files of marshal, of which ``Request`` has the fields of the first and
``probe_report.ProbeReport`` those of the second. Standard library only, and no name of ours in ``sys.modules``.

``"plain"`` is what a program would be: the variables of a rank, perturbations if any, then its imports. ``"fork"`` is
what its ranks would be as forks of the zygote: first the imports without these variables, by the zygote's own code;
then for each rank a fork, its variables, the repairs, and the imports again. ``"harmless"`` is plain too, and compares
what all modules that were there keep before and after the last imports.
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
    from typing import Any, Literal, TypedDict

    from ddplaunch.core.rank import atexit_cleanup as leftovers
    from ddplaunch.core.rank import preload_runner as preloading
    from ddplaunch.features.preload.rank import fork_fixups as repairs
    from tests.preload_audit import (
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
        kind: Literal["plain", "fork", "harmless"]
        first: list[str]  # what is imported in any case: torch
        modules: list[str]  # what is audited
        last: list[str]  # what is imported after that
        compared: list[str] | None  # the modules to tell of; None for all but those that ``first`` brings
        ranks: list[dict[str, str]]  # the variables of each
        perturbation: str  # one of PERTURBATIONS, or ""
        folder: str  # the program's own
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
        _load("tests", "preload_audit", name)
        for name in (
            *("allowed_differences", "environment", "import_stack", "perturbations", "process_state"),
            *("readers", "recorder", "state"),
        )
    )
    leftovers, preloading = (_load("ddplaunch", "core", "rank", name) for name in ("atexit_cleanup", "preload_runner"))
    repairs = _load("ddplaunch", "features", "preload", "rank", "fork_fixups")

_PDEATHSIG, _SIGKILL = 1, 9


class Probe:
    def __init__(self, request: Request, answer: str) -> None:
        self.request, self.read_result = request, answer
        self.forks = request["kind"] == "fork"
        os.environ.pop("PYTHONHASHSEED", None)  # all have one seed of hashes, which no library is to see
        os.environ.pop("PYTHONPATH", None)
        self.imports = import_stack.ImportStack()
        folders = [request["folder"], os.getcwd()]
        self.recorder = recorder.Recorder(self.imports, repairs.RANK_READERS, allowed_differences, folders)
        self.import_errors: dict[str, str] = {}
        self.in_any_case = frozenset(sys.modules)
        if not self.forks:
            self._become_a_rank(request["ranks"][0])
        self.process_state = process_state.ProcessStateMonitor(
            self.imports, self.recorder, environment, forks=self.forks, exempt=frozenset(request["first"])
        )
        self.recorder.record_shared_memory()
        for _ in environment.take_native_reads():
            pass
        words = ["zygote.py", "3", "{}"] if self.forks else [os.path.basename(_MAIN), "--epochs", "3"]
        self.recorder.install(environment, words)
        self.imports.install(self.process_state.on_module_start, self.process_state.on_module_end)
        if not self.forks:
            self._replace_main()

    def run(self) -> None:
        if self.forks:
            self._fork()
            return
        for name in self.request["first"]:
            self._import(name)
        self.in_any_case = frozenset(sys.modules)
        if "tempfile" in sys.modules:
            sys.modules["tempfile"].__dict__["tempdir"] = (
                None  # kept by torch's import, which asks only where dill is installed
            )
        self._perturb()
        if self.request["kind"] == "harmless":
            for name in self.request["modules"]:
                self._import(name)
            before = self._dump([name for name in list(sys.modules) if not name.startswith(("_cython_", "__m"))])
            unchanged = self._dump(before["modules"])
            for name in self.request["last"]:
                self._import(name)
            after = self._dump(before["modules"])
            self._send([before, unchanged, after])
            return
        for name in self.request["modules"] + self.request["last"]:
            self._import(name)
        self._send([self._dump(self._compared())])

    def _fork(self) -> None:
        gc.disable()
        left = leftovers.AtexitCleanup()
        with left:
            for name in self.request["first"] + self.request["modules"]:
                self._import_as_the_zygote(name)
                if name in self.request["first"]:
                    self.in_any_case = frozenset(sys.modules)
        gc.freeze()
        snapshots = []
        for number, variables in enumerate(self.request["ranks"]):
            parent, path = os.getpid(), f"{self.read_result}.{number}"
            pid = posix.fork()
            if pid == 0:
                try:
                    os.setsid()
                    _die_with(parent)
                    left.disable_in_rank()
                    self._become_a_rank(variables)
                    self._replace_main()
                    repairs.apply_fixups()
                    gc.enable()
                    for name in self.request["first"] + self.request["modules"]:
                        self._import(name)
                    self._write(path, self._dump(self._compared()))
                except BaseException:
                    sys.__excepthook__(*sys.exc_info())
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            with open(path, "rb") as file:
                snapshots.append(marshal.load(file))
        left.run()
        self._send(snapshots)

    def _become_a_rank(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)
        sys.path.insert(0, self.request["folder"])
        environment.set_arguments([os.path.basename(_MAIN), "--epochs", "3"])

    def _replace_main(self) -> None:
        environment.make_main(
            os.path.join(self.request["folder"], os.path.basename(_MAIN)), self.recorder.on_arguments_read
        )

    def _perturb(self) -> None:
        if name := self.request["perturbation"]:
            self.recorder.is_paused = True
            perturbations.PERTURBATIONS[name](self.request["empty_folder"])
            self.recorder.is_paused = False
            self.process_state.accept_changes()

    def _import(self, name: str) -> None:
        try:
            __import__(name)
        except BaseException as error:
            self.import_errors[name] = f"{type(error).__name__}: {error}"

    def _import_as_the_zygote(self, name: str) -> None:
        config: Any = {
            "modules": [name],
            "user_modules": [],
            "sys_path_0": self.request["folder"],
            "import_environment": {},
            "fallback": [],
        }
        config |= {"import_dirs": [], "environment_reads": []}
        found = preloading.run_preload(config, _no_guard)
        if any(found) or name not in sys.modules:
            self.import_errors[name] = "it cannot be imported by itself"

    def _compared(self) -> list[str]:
        if self.request["compared"] is not None:
            return self.request["compared"]
        return [name for name in list(sys.modules) if name not in self.in_any_case and not _by_contract(name)]

    def _dump(self, names: Any) -> dict[str, Any]:
        self.recorder.is_paused = True
        gc.unfreeze()
        gc.collect()
        natives = readers.Natives()
        reader = state.Reader(
            allowed_differences.NAMES, allowed_differences.ATTRIBUTES, natives, state.shared_generators()
        )
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(1_000_000)
        try:
            modules = reader.modules([name for name in names if name in sys.modules])
            rest = state.shared_state(state.Reader({}, {}, natives), environment.data())
        finally:
            sys.setrecursionlimit(limit)
        self.recorder.is_paused = False
        return {
            "modules": modules,
            "shared": rest,
            "opaque": reader.opaque,
            "generators": reader.generators,
        }

    def _send(self, snapshots: list[dict[str, Any]]) -> None:
        self.recorder.is_paused = True
        seen = self.imports
        files = {}
        for name, module in list(sys.modules.items()):
            space = state.namespace(module)
            origin = getattr(space.get("__spec__"), "origin", None)
            files[name] = str(space.get("__file__") or origin or "")
        answer = {
            "edges": seen.edges,
            "import_errors": self.import_errors,
            "actions": self.recorder.actions,
            "variable_reads": self.recorder.variable_reads,
            "state_changes": self.recorder.state_changes,
            "absent_imports": seen.absent_imports,
            "searches": seen.searches,
            "files": files,
            "loggers": sorted(set(perturbations.LOGGERS)),
            "snapshots": snapshots,
        }
        self._write(self.read_result, answer)
        os._exit(0)  # without what was registered for the end

    def _write(self, path: str, answer: dict[str, Any]) -> None:
        self.recorder.is_paused = True
        with open(path, "wb") as file:
            marshal.dump(answer, file)


def _by_contract(name: str) -> bool:
    """Whether what a module keeps is not to be compared: it is Python's, or native code's own."""
    top = name.partition(".")[0]
    return top.startswith("_cython_") or top in ("__main__", "__mp_main__") or top in sys.stdlib_module_names


def _no_guard() -> Any:
    raise NotImplementedError  # the guard is for packages that have been audited


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


_MAIN = sys.argv[0]


def main() -> None:
    path, answer = sys.argv[1:]
    with open(path, "rb") as file:
        request: Request = marshal.load(file)
    _die_with(request["parent"])
    try:
        Probe(request, answer).run()
    except BaseException:
        sys.__excepthook__(*sys.exc_info())  # the imports may have set another
        os._exit(1)


main()
