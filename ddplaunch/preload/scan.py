"""What one file of Python source says that matters to whoever imports for it: imports, variables set, doubts.

Only statements are looked at, in the order in which they stand; what they mean together is for ``program``.
"""

from __future__ import annotations

import _ast as ast
import re
from collections.abc import Iterator

from ddplaunch.preload.facts import Assignment, Doubt, Finding, Import, Reach, Seeding

_Setting = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete

_FATEFUL = re.compile(
    r"environ|putenv|unsetenv|dotenv|setenv|sys\.|\b(?:path|modules|meta_path)\b|addsitedir|reload|seed|(?:set_?|rng_)state"
)
"""Without one of these words in a file, none of its statements is looked at but imports."""

_NEEDS_DYNAMO = re.compile(
    r"DistributedDataParallel|\boptim\b|\bfully_shard\b|FullyShardedDataParallel|torch\.compile|\.compile\("
    r"|\blightning\b|\bpytorch_lightning\b|\baccelerate\b|\btransformers\b|\bTrainer\b|ZeroRedundancyOptimizer"
)

_PATCHERS = {"gevent": "patches the standard library", "eventlet": "patches the standard library"}
_PATCHERS["unsloth"] = "must be imported before what it patches"
_READERS = frozenset({"get", "copy", "items", "keys", "values", "__contains__", "__getitem__"})


def needs_dynamo(text: str) -> bool:
    """Whether source seems to use what imports ``torch._dynamo`` (and sympy with it, a second in every rank)."""
    return bool(_NEEDS_DYNAMO.search(text))


def scan(tree: ast.Module, text: str) -> tuple[Finding, ...]:
    """Return what the file of this syntax tree and text says, in order."""
    return tuple(_Scanner(bool(_FATEFUL.search(text))).block(tree.body, Reach.SURE))


class _Scanner:
    def __init__(self, fateful: bool) -> None:
        self._fateful = fateful

    def block(self, body: list[ast.stmt], reach: Reach) -> Iterator[Finding]:
        for node in body:
            yield from self._statement(node, reach)

    def _statement(self, node: ast.stmt, reach: Reach) -> Iterator[Finding]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from self._import(Import(node.lineno, reach, alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield from self._import(Import(node.lineno, reach, node.module or "", names, node.level))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self.block(node.body, Reach.MAYBE)
        elif isinstance(node, ast.ClassDef):
            yield from self.block(node.body, reach)
        elif isinstance(node, ast.If):
            yield from self._condition(node, reach)
        elif isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            tried = min(reach, Reach.TRIED)
            yield from self.block(node.body, tried)  # type: ignore[attr-defined, unused-ignore]
            for handler in node.handlers:  # type: ignore[attr-defined, unused-ignore]
                yield from self.block(handler.body, tried)
            yield from self.block([*node.orelse, *node.finalbody], tried)  # type: ignore[attr-defined, unused-ignore]
        elif isinstance(node, ast.With | ast.AsyncWith):
            yield from self._simple(*(item.context_expr for item in node.items), reach=min(reach, Reach.TRIED))
            yield from self.block(node.body, min(reach, Reach.TRIED))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.While):
            yield from self.block([*node.body, *node.orelse], Reach.MAYBE)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                yield from self.block(case.body, Reach.MAYBE)
        else:
            yield from self._simple(node, reach=reach)

    def _condition(self, node: ast.If, reach: Reach) -> Iterator[Finding]:
        if getattr(node.test, "attr", getattr(node.test, "id", None)) == "TYPE_CHECKING":
            yield from self.block(node.orelse, reach)
        elif _is_main(node.test):
            yield from self.block(node.body, reach)
        else:
            yield from self._simple(node.test, reach=reach)
            yield from self.block([*node.body, *node.orelse], Reach.MAYBE)

    def _import(self, found: Import) -> Iterator[Finding]:
        top = found.module.partition(".")[0]
        if not found.level and top in _PATCHERS:
            yield Doubt(found.line, f"imports {top}, which {_PATCHERS[top]}")
        yield found

    def _simple(self, *nodes: ast.AST, reach: Reach) -> Iterator[Finding]:
        """What statements without a block, and expressions, set and change."""
        if not self._fateful:
            return
        for root in nodes:
            for node in _walk(root):
                if isinstance(node, _Setting):
                    yield from self._assignment(node, reach)
                elif isinstance(node, ast.Call):
                    yield from self._call(node, reach)

    def _assignment(self, node: _Setting, reach: Reach) -> Iterator[Finding]:
        value = None if isinstance(node, ast.Delete) else node.value
        for target in node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]:
            inner = target.value if isinstance(target, ast.Subscript) else target
            if _is_environ(inner):
                if isinstance(target, ast.Subscript):
                    yield Assignment(node.lineno, reach, _text(target.slice), _text(value))
                else:  # ``os.environ |= …``
                    yield from _pairs(value, node.lineno, reach)
            elif (words := _changed(inner)) and not (words == "sys.path" and isinstance(node, ast.AugAssign)):
                yield Doubt(node.lineno, f"changes {words}")
        if isinstance(node, ast.Assign | ast.AnnAssign) and value is not None and _is_environ(value):
            yield Assignment(node.lineno, reach, None, None)  # by another name, whatever is done to it

    def _call(self, node: ast.Call, reach: Reach) -> Iterator[Finding]:
        function, line = node.func, node.lineno
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = function.value if isinstance(function, ast.Attribute) else None
        if owner is not None and _is_environ(owner):
            if name == "setdefault" and node.args:
                yield Assignment(line, reach, _text(node.args[0]), _text(*node.args[1:2]), default=True)
            elif name in ("pop", "__setitem__", "__delitem__") and node.args:
                yield Assignment(line, reach, _text(node.args[0]), None)
            elif name == "update":
                yield from (each for given in node.args for each in _pairs(given, line, reach))
                yield from (Assignment(line, reach, each.arg, _text(each.value)) for each in node.keywords)
            elif name not in _READERS:
                yield Assignment(line, reach, None, None)
        elif name in ("putenv", "unsetenv", "setenv", "delenv"):
            yield Assignment(line, reach, _text(*node.args[:1]), None)
        elif name in ("load_dotenv", "read_env") or (name != "dict" and any(map(_is_environ, node.args))):
            yield Assignment(line, reach, None, None)
        elif owner is not None and (words := _changed(owner)) and name not in ("append", "extend", *_READERS):
            yield Doubt(line, f"changes {words}")
        elif name in ("addsitedir", "reload"):
            yield Doubt(line, f"calls {name}")
        elif "seed" in name or name in ("setstate", "set_state", "set_rng_state"):
            yield Seeding(line, reach)


def _walk(root: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it, as ``ast.walk`` gives them: that module takes longer to load than this to run."""
    todo = [root]
    while todo:
        node = todo.pop()
        yield node
        for name in reversed(node._fields):
            value = getattr(node, name, None)
            below = value if isinstance(value, list) else [value]
            todo += [each for each in reversed(below) if isinstance(each, ast.AST)]


def _is_main(test: ast.expr) -> bool:
    """Whether it is ``__name__ == "__main__"``."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    return getattr(test.left, "id", None) == "__name__" and _text(test.comparators[0]) == "__main__"


def _is_environ(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", None)) in ("environ", "environb")


def _changed(node: ast.expr) -> str | None:
    """Name what of ``sys`` an expression is, of what says how things are imported."""
    of_sys = isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "sys"
    name = getattr(node, "attr", "")
    return f"sys.{name}" if of_sys and name in ("path", "meta_path", "path_hooks", "modules") else None


def _text(node: ast.expr | None = None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _pairs(node: ast.expr | None, line: int, reach: Reach) -> Iterator[Assignment]:
    if not isinstance(node, ast.Dict):
        yield Assignment(line, reach, None, None)
        return
    for key, value in zip(node.keys, node.values, strict=True):
        yield Assignment(line, reach, _text(key), _text(value))
