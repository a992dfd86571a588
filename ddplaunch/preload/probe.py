"""Imports what a program imports, in an interpreter made for that, and tells what it saw: one half of a comparison.

Run from its path, as ``python probe.py REQUEST ANSWER``: JSON files, of which ``Request`` has the fields of the first
and ``culprits.Account`` those of the second. Standard library only, and no name of ours in ``sys.modules``.

``"plain"`` is what the program would be: the variables of a rank, then its import statements. ``"fork"`` is what it
would be as a fork of the zygote: first the modules without these variables, by the zygote's own code; then a fork, the
variables, the repairs, and the statements. Both tell what their modules keep at the end.
"""

from __future__ import annotations

import sys

BASELINE = frozenset(sys.modules)
if not getattr(sys.flags, "safe_path", False):
    sys.path.pop(0)

import ctypes  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal, TypedDict

    from ddplaunch.preload import excused, findings, import_stack, state, surroundings
    from ddplaunch.rank import leftovers, preloading, repairs

    class Request(TypedDict):
        kind: Literal["plain", "fork"]
        statements: list[tuple[str, list[str]]]
        late: list[str]
        settings: dict[str, str]  # what the program sets, as far as its source shows
        modules: list[str]  # what the zygote imports
        variables: dict[str, str]  # of the rank
        first: str  # an empty folder, where the program's own would be
        parent: int
else:
    from importlib.util import module_from_spec, spec_from_file_location

    def _load(*path: str) -> Any:
        home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = spec_from_file_location(path[-1], os.path.join(home, *path) + ".py")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    excused, findings, import_stack, state, surroundings = (
        _load("preload", name) for name in ("excused", "findings", "import_stack", "state", "surroundings")
    )
    leftovers, preloading, repairs = (_load("rank", name) for name in ("leftovers", "preloading", "repairs"))

_PDEATHSIG, _SIGKILL = 1, 9


def main() -> None:
    path, answer = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        request: Request = json.load(file)
    _die_with(request["parent"])
    try:
        Probe(request, answer).run()
    except BaseException:
        sys.__excepthook__(*sys.exc_info())  # the program's imports may have set another
        os._exit(1)


class Probe:
    def __init__(self, request: Request, answer: str) -> None:
        self.request, self.answer = request, answer
        self.forks = request["kind"] == "fork"
        sys.argv[:] = ["zygote.py", "3", "{}"] if self.forks else ["train.py"]
        sys.orig_argv[:] = [sys.executable, *sys.argv]
        # Both have one seed of hashes, which no library is to see.
        os.environ.pop("PYTHONHASHSEED", None)
        os.environ.update(request["settings"])
        self.imports = import_stack.ImportStack()
        self.findings = findings.Findings(self.imports, repairs.READERS)
        self.failed: dict[str, str] = {}
        self.at_start = frozenset(sys.modules)
        if not self.forks:
            self._become_a_rank()
        self.surroundings = surroundings.Surroundings(self.imports, self.findings, forks=self.forks)
        self.findings.look_at_maps()
        self.findings.install()
        self.imports.install(self.surroundings.begins, self.surroundings.finished)

    def run(self) -> None:
        if not self.forks:
            self._import_as_the_program()
            self._tell(self._dump())
            return
        gc.disable()
        left = leftovers.Leftovers()
        with left:
            for name in self.request["modules"]:
                self._import_as_the_zygote(name)
        gc.freeze()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _die_with(parent)
                left.pass_over()
                self._become_a_rank()
                os.environ.update(self.request["settings"])
                repairs.apply()
                gc.enable()
                self._import_as_the_program()
                self._write(self.answer + ".fork", self._dump())
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        dumped: dict[str, Any] = {}
        if status == 0:
            with open(self.answer + ".fork", encoding="utf-8") as file:
                dumped = json.load(file)
        left.remove()
        self._tell(dumped)

    def _become_a_rank(self) -> None:
        os.environ.update(self.request["variables"])
        sys.modules["__main__"] = main = type(sys)("__main__")
        main.__dict__["__builtins__"] = sys.modules["builtins"]
        main.__dict__["__file__"] = os.path.join(self.request["first"], "train.py")
        sys.argv[:] = ["train.py"]
        sys.orig_argv[:] = [sys.executable, "train.py"]
        sys.path.insert(0, self.request["first"])

    def _import_as_the_program(self) -> None:
        space = sys.modules["__main__"].__dict__
        for module, names in self.request["statements"]:
            text = f"from {module} import {', '.join(names)}" if names else f"import {module}"
            self._attempt(module, text, space)
        for module in self.request["late"]:
            self._attempt(module, f"import {module}", {"__name__": "__main__"})
        self.imports.statement = ""

    def _attempt(self, module: str, text: str, space: dict[str, Any]) -> None:
        self.imports.statement = module
        try:
            exec(text, space)
        except BaseException as error:
            self.failed[module] = f"{type(error).__name__}: {error}"

    def _import_as_the_zygote(self, name: str) -> None:
        self.imports.statement = name
        config: Any = {"modules": [name], "asked": [], "first": self.request["first"], "settings": {}, "fallback": []}
        _, broken = preloading.load(config)
        if broken or name not in sys.modules:
            self.failed[name] = "it cannot be imported by itself"
        self.imports.statement = ""

    def _dump(self) -> dict[str, Any]:
        self.findings.quiet = True
        names = [name for name in list(sys.modules) if name not in self.at_start and not _by_contract(name)]
        self.imports.statement = ""
        return {"modules": state.Reader(excused.NAMES, excused.ATTRIBUTES).modules(names), "shared": state.shared()}

    def _tell(self, dumped: dict[str, Any]) -> None:
        seen = self.imports
        files = {}
        for name, module in list(sys.modules.items()):
            space = state.namespace(module)
            origin = getattr(space.get("__spec__"), "origin", None)
            files[name] = str(space.get("__file__") or origin or "")
        answer = {
            "loaded": seen.loaded,
            "edges": {name: sorted(edges) for name, edges in seen.edges.items()},
            "asked": sorted(seen.asked),
            "failed": self.failed,
            "found": list(self.findings.found),
            "read": {name: list(stacks) for name, stacks in self.findings.read.items()},
            "changed": {name: list(stacks) for name, stacks in self.findings.changed.items()},
            "libraries": self.findings.libraries,
            "files": files,
            "kept": dumped,
        }
        self._write(self.answer, answer)
        os._exit(0)  # what was registered for the end is nobody's concern

    def _write(self, path: str, answer: dict[str, Any]) -> None:
        self.findings.quiet = True
        with open(path, "w", encoding="utf-8") as file:
            json.dump(answer, file)


def _by_contract(name: str) -> bool:
    """Whether what a module keeps is not to be compared: it is preloaded in any case, or native code's own."""
    top = name.partition(".")[0]
    return top.startswith("_cython_") or top in ("torch", "__main__", "__mp_main__")


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
