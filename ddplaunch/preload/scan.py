"""What one file of Python source says that matters to whoever imports for it, in the order in which it stands there.

Only statements are looked at, and calls of a few names; what they mean together is for ``program`` and ``admission``.
"""

from __future__ import annotations

import _ast as ast
import re
from collections.abc import Iterator, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.preload.facts import Assignment, Barrier, Effect, Finding, Folder, Import, Patch, Reach
from ddplaunch.preload.paths import Paths

if TYPE_CHECKING:
    from typing import Any

_FATEFUL = re.compile(
    r"environ|putenv|setenv|dotenv|read_env|delenv|sys\b|\b(?:path|modules|meta_path|patch|mock)\b|addsitedir|reload"
    r"|exec|eval|import_module|__import__|setattr|delattr|run_path|run_module"
)
"""Without one of these words in a file, none of its expressions is looked at."""

_NEEDS_DYNAMO = re.compile(
    r"DistributedDataParallel|\boptim\b|\bfully_shard\b|FullyShardedDataParallel|torch\.compile|\.compile\("
    r"|\blightning\b|\bpytorch_lightning\b|\baccelerate\b|\btransformers\b|\bTrainer\b|ZeroRedundancyOptimizer"
)

_READERS = frozenset({"get", "copy", "items", "keys", "values", "index", "count", "__contains__", "__getitem__"})
_OF_IMPORTS = frozenset({"path", "meta_path", "path_hooks", "path_importer_cache", "modules"})
_CALLS = {
    "addsitedir": "calls addsitedir",
    "run_path": "runs another file",
    "run_module": "runs another module",
}
_IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError"})
_BLOCKS = ("body", "handlers", "cases", "orelse", "finalbody")
_IN_BLOCKS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def needs_dynamo(text: str) -> bool:
    """Whether source seems to use what imports ``torch._dynamo`` (and sympy with it, a second in every rank)."""
    return bool(_NEEDS_DYNAMO.search(text))


def scan(tree: ast.Module, text: str, file: str, name: str) -> tuple[Finding, ...]:
    """Return what the file of this syntax tree, text and path says, in order; ``name`` is what to call it."""
    return tuple(_Scanner(bool(_FATEFUL.search(text)), file, name).file(tree))


class _Scanner:
    def __init__(self, fateful: bool, file: str, name: str) -> None:
        self._fateful, self._file = fateful, name
        self._others: dict[str, tuple[str, Import]] = {}  # what names stand for that others may have made
        self._paths = Paths(file)

    def file(self, tree: ast.Module) -> Iterator[Finding]:
        self._name(tree.body)
        self._paths.learn(tree.body)
        yield from self.block(tree.body, Reach.SURE)

    def _at(self, node: ast.stmt | ast.expr | ast.ExceptHandler) -> str:
        return f"{self._file}:{node.lineno}"

    def block(self, body: Sequence[ast.AST], reach: Reach) -> Iterator[Finding]:
        for node in body:
            yield from self._statement(node, reach)

    def _statement(self, node: Any, reach: Reach) -> Iterator[Finding]:
        """Of a statement, or one of the clauses that it has."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(self._at(node), reach, alias.name)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(self._at(node), reach, node.module or "", names, node.level)
        elif isinstance(node, ast.If) and getattr(node.test, "attr", getattr(node.test, "id", None)) == "TYPE_CHECKING":
            yield from self.block(node.orelse, reach)
        elif isinstance(node, ast.If) and _is_main(node.test):
            yield from self.block(node.body, reach)
        else:
            if type(node).__name__ in ("Try", "TryStar", "With", "AsyncWith"):
                reach = min(reach, Reach.TRIED)
            yield from self._simple(node, reach)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and reach > Reach.SELDOM:
                reach = Reach.LATER
            elif isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Match):
                reach = reach.under_condition()
            for name in _BLOCKS:
                yield from self.block(getattr(node, name, []), reach)

    def _simple(self, node: Any, reach: Reach) -> Iterator[Finding]:
        """What a statement sets and changes by itself, without the blocks in it."""
        said: list[Finding] = []
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            said += self._assignment(node, reach)
        if self._fateful:
            for each in _walk(node):
                if isinstance(each, ast.Call):
                    said += self._call(each, reach)
        # A constant for a variable holds for what is imported before the fork too (Choice.settings).
        shown = [isinstance(each, Assignment) and each.name is not None and each.value is not None for each in said]
        if reach > Reach.LATER and not (shown and all(shown)) and (effect := _effect(node)):
            yield Effect(self._at(effect), reach)
        yield from said

    def _assignment(
        self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete, reach: Reach
    ) -> Iterator[Finding]:
        value = None if isinstance(node, ast.Delete) else node.value
        for target in _targets(node):
            inner = target.value if isinstance(target, ast.Subscript) else target
            if _is_environ(inner):
                if isinstance(target, ast.Subscript):
                    yield Assignment(self._at(node), reach, _text(target.slice), _text(value))
                else:  # ``os.environ |= …``
                    yield from _pairs(value, self._at(node), reach)
            elif (of := _of_imports(inner)) == "sys.path":
                more = value if inner is target and isinstance(node, ast.AugAssign) else None
                yield from self._folders(more, self._at(node), reach)
            elif of:
                yield Patch(self._at(node), reach, of)
            elif isinstance(target, ast.Attribute | ast.Subscript):
                yield from self._patch(target, self._at(node), reach)
        if isinstance(node, ast.Assign | ast.AnnAssign) and value is not None and _is_environ(value):
            yield Assignment(self._at(node), reach, None, None)  # by another name, whatever is done to it

    def _patch(self, target: ast.expr, where: str, reach: Reach) -> Iterator[Finding]:
        if (found := self._origin(target)) is not None:
            yield Patch(where, reach, *found)

    def _origin(self, node: ast.AST | None) -> tuple[str, Import | None] | None:
        """What an expression is, where it is another module's: by its names, and by which import."""
        if isinstance(node, ast.Name):
            return self._others.get(node.id)
        if isinstance(node, ast.Attribute):
            found = self._origin(node.value)
            return found and (f"{found[0]}.{node.attr}", found[1])
        if isinstance(node, ast.Subscript):
            return self._origin(node.value)
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("getattr", "vars", "type"):
                return self._origin(node.args[0] if node.args else None)
            if name in ("import_module", "__import__"):
                return (_text(*node.args[:1]) or "a module", None)
        return None

    def _call(self, node: ast.Call, reach: Reach) -> Iterator[Finding]:
        function, where = node.func, self._at(node)
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = function.value if isinstance(function, ast.Attribute) else None
        if owner is not None and _is_environ(owner):
            if name == "setdefault" and node.args:
                yield Assignment(where, reach, _text(node.args[0]), _text(*node.args[1:2]), default=True)
            elif name in ("pop", "__setitem__", "__delitem__") and node.args:
                yield Assignment(where, reach, _text(node.args[0]), None)
            elif name == "update":
                yield from (each for given in node.args for each in _pairs(given, where, reach))
                yield from (Assignment(where, reach, each.arg, _text(each.value)) for each in node.keywords)
            elif name not in _READERS:
                yield Assignment(where, reach, None, None)
        elif name in ("putenv", "unsetenv", "setenv", "delenv"):
            yield Assignment(where, reach, _text(*node.args[:1]), None)
        elif name in ("load_dotenv", "read_env") or (name != "dict" and any(map(_is_environ, node.args))):
            yield Assignment(where, reach, None, None)
        elif owner is not None and (of := _of_imports(owner)) and name not in _READERS:
            if of == "sys.path":
                given = node.args[-1] if node.args and name in ("append", "insert", "extend") else None
                one = given is not None and name != "extend"
                yield from self._folders(ast.List([given]) if one and given else given, where, reach)
            else:
                yield Patch(where, reach, of)
        elif name in ("import_module", "__import__"):
            module = _text(*node.args[:1])
            if module is None or module.startswith("."):
                yield Barrier(where, reach, "imports what its source does not show")
            else:
                yield Import(where, reach, module)
        elif name in _CALLS:
            yield Barrier(where, reach, _CALLS[name])
        elif owner is None and name in ("exec", "eval"):
            yield Barrier(where, reach, f"calls {name}")
        elif name == "reload":
            yield Patch(where, reach, "what it reloads")
        elif name in ("setattr", "delattr") and node.args:
            yield from self._patch(node.args[0], where, reach)
        elif (origin := self._origin(function)) and re.match(r"(unittest\.)?mock\b.*\.patch\b", origin[0]):
            yield Patch(where, reach, "what mock.patch names")

    def _folders(self, node: ast.expr | None, where: str, reach: Reach) -> Iterator[Finding]:
        """Of the list that ``sys.path`` gets; None where it is changed in another way."""
        elements = node.elts if isinstance(node, ast.List | ast.Tuple) else [None]
        for each in elements:
            path = self._paths.value(each)
            if path is None:
                words = "changes sys.path" if node is None else "adds to sys.path what its source does not show"
                yield Barrier(where, reach, words)
            else:
                yield Folder(where, reach, path)

    def _name(self, body: Sequence[ast.AST]) -> None:
        """Note which names stand for what was imported, wherever that is done, and what is assigned from those."""
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    source = Import(self._at(node), Reach.SURE, alias.name)
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._others[alias.asname or name] = (name, source)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    source = Import(self._at(node), Reach.SURE, node.module or "", (alias.name,), node.level)
                    self._others[alias.asname or alias.name] = (f"{node.module or ''}.{alias.name}".strip("."), source)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.Attribute | ast.Name) and (found := self._origin(node.value)):
                    assert found[1] is not None
                    self._others[node.targets[0].id] = (found[0], found[1])
            else:
                for name in _BLOCKS:
                    self._name(getattr(node, name, []))


def _walk(root: ast.AST) -> Iterator[ast.AST]:
    """The node and all expressions below it; ``ast.walk`` would do, but takes longer to load than this to run."""
    todo = [root]
    while todo:
        node = todo.pop()
        yield node
        for name in reversed(node._fields):
            value = getattr(node, name, None)
            below = value if isinstance(value, list) else [value]
            todo += [each for each in reversed(below) if isinstance(each, ast.AST) and not isinstance(each, _IN_BLOCKS)]


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> list[ast.expr]:
    todo = [*node.targets] if isinstance(node, ast.Assign | ast.Delete) else [node.target]
    found: list[ast.expr] = []
    while todo:
        each = todo.pop(0)
        if isinstance(each, ast.Tuple | ast.List):
            todo = [*each.elts, *todo]
        else:
            found.append(each.value if isinstance(each, ast.Starred) else each)
    return found


def _effect(node: Any) -> ast.stmt | ast.ExceptHandler | None:
    """Where a statement does more than name a constant or a function, if it does."""
    match node:
        case ast.Pass() | ast.Global() | ast.Nonlocal() | ast.Expr(value=ast.Constant()):
            return None
        case ast.Assign(value=value) if all(isinstance(each, ast.Name) for each in _targets(node)):
            return None if _is_constant(value) else node
        case ast.AnnAssign(target=ast.Name(), value=value) if not _calls(node.annotation):
            return None if value is None or _is_constant(value) else node
        case ast.FunctionDef(decorator_list=[]) | ast.AsyncFunctionDef(decorator_list=[]):
            return node if _calls(node) else None
        case ast.ExceptHandler() | ast.match_case():
            return None
    return _catches_more(node) if hasattr(node, "handlers") else node


def _catches_more(node: ast.Try) -> ast.ExceptHandler | None:
    """The first clause for what is not an error of an import."""
    for handler in node.handlers:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if not all(getattr(kind, "id", None) in _IMPORT_ERRORS for kind in kinds):
            return handler
    return None


def _calls(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in _walk(node))


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return all(map(_is_constant, node.elts))
    if isinstance(node, ast.Dict):
        return all(key is not None and _is_constant(key) for key in node.keys) and all(map(_is_constant, node.values))
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_constant(node.left) and _is_constant(node.right)
    return isinstance(node, ast.Constant | ast.Name)


def _is_main(test: ast.expr) -> bool:
    """Whether it is ``__name__ == "__main__"``."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    return getattr(test.left, "id", None) == "__name__" and _text(test.comparators[0]) == "__main__"


def _is_environ(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", None)) in ("environ", "environb")


def _of_imports(node: ast.expr) -> str | None:
    """Name what of ``sys`` an expression is, of what says how things are imported."""
    of_sys = isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "sys"
    name = getattr(node, "attr", "")
    return f"sys.{name}" if of_sys and name in _OF_IMPORTS else None


def _text(node: ast.expr | None = None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _pairs(node: ast.expr | None, where: str, reach: Reach) -> Iterator[Assignment]:
    if not isinstance(node, ast.Dict):
        yield Assignment(where, reach, None, None)
        return
    for key, value in zip(node.keys, node.values, strict=True):
        yield Assignment(where, reach, _text(key), _text(value))
