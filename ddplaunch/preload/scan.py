"""What one file of Python source says that matters to whoever imports for it, in the order in which it stands there.

Only statements are looked at, and calls of a few names; what they mean together is for ``program`` and ``admission``.
"""

from __future__ import annotations

import _ast as ast
import re
import sys
from collections.abc import Iterator, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.preload.facts import Assignment, Barrier, Effect, Finding, Folder, Import, Logger, Patch, Reach, Use
from ddplaunch.preload.paths import Paths
from ddplaunch.preload.sensitive import ANY, MODULES, SENSITIVE, is_own_name, sensitive_word
from ddplaunch.preload.syntax import BLOCKS, IN_BLOCKS, as_text, find_effect, is_main, targets, walk

if TYPE_CHECKING:
    from typing import Any

_READERS = frozenset({"get", "copy", "items", "keys", "values", "index", "count", "__contains__", "__getitem__"})
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear"})
_COPIES = frozenset({"dict", "list", "tuple", "set", "sorted", "len", "print", "repr", "str", "copy", "deepcopy"})
_LOOKS = frozenset({"getattr", "hasattr", "dir", "print", "type", "isinstance", "id", "repr"})

_OF_VARIABLES = frozenset({"environ", "environb", "putenv", "unsetenv"})
_OF_LISTS = frozenset({"environ", "environb", "path", "modules", "__dict__"})  # what can be read without harm
_HOOKS = frozenset({"meta_path", "path_hooks", "modules", "__import__", "setdlopenflags", "setLoggerClass"})
_SETS_VARIABLES = re.compile(r"dotenv|(?:set|read|load|patch|update|export|del|put)_?env", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|HOME|LOGNAME|TE?MP|TMPDIR|USER")
_WORDS = {
    "addsitedir": "calls addsitedir",
    "run_path": "runs another file",
    "run_module": "runs another module",
    "import_module": "imports what its source does not show",
    "__import__": "imports what its source does not show",
    "path": "changes sys.path",
}


def scan(tree: ast.Module, file: str, name: str, *, shared: bool = False) -> tuple[Finding, ...]:
    """Return what the file of this syntax tree and path says, in order.

    Args:
        name: what to call the file.
        shared: other files of the program can import from it.
    """
    return tuple(_Scanner(file, name, shared).file(tree))


class _Scanner:
    def __init__(self, file: str, name: str, shared: bool) -> None:
        self._file, self._shared = name, shared
        self._others: dict[str, tuple[str, Import]] = {}  # what names stand for that others may have made
        self._modules = set[str]()  # those of them that are modules
        self._defined = set[str]()  # functions and classes of the file
        self._used = set[tuple[str, Reach]]()
        self._paths = Paths(file)

    def file(self, tree: ast.Module) -> Iterator[Finding]:
        self._name(tree.body)
        self._paths.learn(tree.body)
        yield from self.block(tree.body, Reach.SURE)

    def _at(self, node: Any) -> str:
        return f"{self._file}:{node.lineno}"

    def block(self, body: Sequence[ast.AST], reach: Reach) -> Iterator[Finding]:
        for node in body:
            yield from self._statement(node, reach)

    def _statement(self, node: Any, reach: Reach) -> Iterator[Finding]:
        """Of a statement, or one of the clauses that it has."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(self._at(node), reach, alias.name)
                yield from self._renamed(node, alias, alias.name, reach)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(self._at(node), reach, node.module or "", names, node.level)
            for alias in node.names:
                yield from self._renamed(node, alias, f"{node.module or ''}.{alias.name}", reach)
        elif isinstance(node, ast.If) and getattr(node.test, "attr", getattr(node.test, "id", None)) == "TYPE_CHECKING":
            yield from self.block(node.orelse, reach)
        elif isinstance(node, ast.If) and is_main(node.test):
            yield from self.block(node.body, reach)
        else:
            if type(node).__name__ in ("Try", "TryStar", "With", "AsyncWith"):
                reach = min(reach, Reach.TRIED)
            yield from self._simple(node, reach)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and reach > Reach.SELDOM:
                reach = Reach.LATER
            elif isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Match):
                reach = reach.under_condition()
            for name in BLOCKS:
                yield from self.block(getattr(node, name, []), reach)

    def _renamed(self, node: ast.stmt, alias: ast.alias, name: str, reach: Reach) -> Iterator[Finding]:
        """Of an import that gives what is sensitive to other files by a name that shows nothing of it."""
        last = name.rpartition(".")[2]
        other = SENSITIVE.get(last) or (alias.asname or last) != last
        if other and self._shared and reach > Reach.LATER and (last in MODULES or sensitive_word(name)):
            yield Barrier(self._at(node), reach, f"gives {name} another name")

    def _simple(self, node: Any, reach: Reach) -> Iterator[Finding]:
        """What a statement sets and changes by itself, without the blocks in it."""
        found: list[Finding] = []
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            found += self._assignment(node, reach)
        elif isinstance(node, ast.For | ast.AsyncFor) and self._sensitive(node.iter) in _OF_LISTS:
            found += self._expression(node.target, reach)
        else:
            found += self._below(node, reach)
        # A constant for a variable holds for what is imported before the fork too (Choice.settings).
        shown = [isinstance(each, Assignment) and each.name is not None and each.value is not None for each in found]
        if reach > Reach.LATER and not (shown and all(shown)) and (effect := find_effect(node)):
            yield Effect(self._at(effect), reach)
        yield from found

    def _assignment(
        self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete, reach: Reach
    ) -> Iterator[Finding]:
        where, value = self._at(node), None if isinstance(node, ast.Delete) else node.value
        taken = False  # the value is understood
        for target in targets(node):
            if isinstance(target, ast.Name) and not isinstance(node, ast.AugAssign):
                continue
            inner = target.value if isinstance(target, ast.Subscript) else target
            word = self._sensitive(inner)
            if word in _OF_VARIABLES:
                if isinstance(target, ast.Subscript):
                    shown = value if target in getattr(node, "targets", ()) else None
                    yield Assignment(where, reach, as_text(target.slice), as_text(shown))
                else:  # ``os.environ |= …``
                    yield from _pairs(value if isinstance(node, ast.AugAssign) else None, where, reach)
            elif word == "path":
                more = value if inner is target and isinstance(node, ast.AugAssign) else None
                taken = True
                yield from self._folders(more, where, reach)
            elif word == "modules" and isinstance(target, ast.Subscript) and is_own_name(target.slice):
                continue
            elif word:
                yield self._escape(word, inner, where, reach)
            elif isinstance(target, ast.Attribute | ast.Subscript):
                if (found := self._origin(target)) is not None:
                    yield Patch(where, reach, *found)
                yield from self._expression(target, reach)
        if isinstance(node, ast.Assign) and isinstance(value, ast.Name) and value.id in self._modules:
            taken = self._others[value.id][0] not in MODULES  # another name for a module, which is followed
        if value is not None and not taken:
            yield from self._expression(value, reach)
        if isinstance(node, ast.AnnAssign):
            yield from self._expression(node.annotation, reach)

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
                return (as_text(*node.args[:1]) or "a module", None)
        return None

    def _qualified(self, node: ast.AST) -> str:
        """The names that lead to what an expression is, as far as the imports of the file show it."""
        if isinstance(node, ast.Name):
            found = self._others.get(node.id)
            builtin = node.id in ("exec", "eval") and node.id not in self._defined
            return found[0] if found else f"builtins.{node.id}" if builtin else node.id
        if isinstance(node, ast.Attribute):
            return f"{self._qualified(node.value)}.{node.attr}"
        if isinstance(node, ast.Call) and self._sensitive(node.func) in ("import_module", "__import__"):
            return as_text(*node.args[:1]) or "?"
        if isinstance(node, ast.Subscript) and (text := as_text(node.slice)):
            if self._sensitive(node.value) == "modules":
                return text
            if isinstance(node.value, ast.Call) and self._qualified(node.value.func) in ("globals", "locals", "vars"):
                return self._qualified(ast.Name(text))
        return "?"

    def _sensitive(self, node: ast.AST) -> str | None:
        """The word of ``SENSITIVE`` that an expression is."""
        if isinstance(node, ast.Attribute) and node.attr == "__dict__" and (found := self._origin(node.value)):
            return "__dict__" if found[0] not in MODULES else "vars"
        if isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id not in self._defined):
            return sensitive_word(self._qualified(node))
        return None

    def _escape(self, word: str, node: ast.AST, where: str, reach: Reach, *, read: bool = False) -> Finding:
        """What it means that something sensitive is used in a way that is not understood."""
        if word in _OF_VARIABLES:
            return Assignment(where, reach, None, None)
        if word == "__dict__" and isinstance(node, ast.Attribute):
            return Patch(where, reach, *(self._origin(node.value) or ("a module", None)))
        name = self._qualified(node).removeprefix("builtins.")
        words = _WORDS.get(word) or f"uses {name}"
        return Barrier(where, reach, words, hook=word in _HOOKS and not read)

    def _below(self, node: ast.AST, reach: Reach) -> Iterator[Finding]:
        """Of all expressions in a node, without the blocks in it."""
        for name in node._fields:
            value = getattr(node, name, None)
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST) and not isinstance(each, IN_BLOCKS):
                    yield from self._expression(each, reach)

    def _expression(self, node: Any, reach: Reach) -> Iterator[Finding]:
        """Of an expression: what is sensitive in it, and not in one of the few forms that are understood, escapes."""
        if isinstance(node, ast.Name | ast.Attribute):
            if word := self._sensitive(node):
                yield self._escape(word, node, self._at(node), reach)
            elif isinstance(node, ast.Name) and self._is_module(node):
                yield self._passed_on(node, reach)
            elif isinstance(node, ast.Attribute) and not self._is_module(node.value):
                yield from self._expression(node.value, reach)
        elif isinstance(node, ast.Call):
            yield from self._call(node, reach)
        elif isinstance(node, ast.Subscript) and (word := self._sensitive(node.value)) in _OF_LISTS:
            read = isinstance(node.ctx, ast.Load)
            if not read or (word == "modules" and not is_own_name(node.slice, read=True)):
                yield self._escape(word, node.value, self._at(node), reach, read=read)
            yield from self._expression(node.slice, reach)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            for each in (node.left, *node.comparators):
                if each is node.left or self._sensitive(each) not in _OF_LISTS:
                    yield from self._expression(each, reach)
        elif isinstance(node, ast.comprehension) and self._sensitive(node.iter) in _OF_LISTS:
            for each in (node.target, *node.ifs):
                yield from self._expression(each, reach)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None:
                    yield from self._expression(key, reach)
                if key is not None or self._sensitive(value) not in _OF_VARIABLES:
                    yield from self._expression(value, reach)
        else:
            yield from self._below(node, reach)

    def _is_module(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self._modules

    def _passed_on(self, node: ast.Name, reach: Reach) -> Finding:
        name, source = self._others[node.id]
        if name in MODULES:
            return Barrier(self._at(node), reach, f"passes {name} on")
        return Patch(self._at(node), reach, name, source, passed=True)

    def _call(self, node: ast.Call, reach: Reach) -> Iterator[Finding]:
        function, where = node.func, self._at(node)
        owner = self._sensitive(function.value) if isinstance(function, ast.Attribute) else None
        given: Sequence[ast.AST] = [*node.args, *node.keywords]
        if owner in _OF_LISTS and isinstance(function, ast.Attribute):
            yield from self._method(owner, function, node, where, reach)
        elif word := self._sensitive(function):
            yield from self._sensitive_call(word, node, where, reach)
        else:
            yield from self._expression(function, reach)
            yield from self._plain_call(node, where, reach)
        for each in given:
            if not self._is_understood(each, node):
                yield from self._expression(each, reach)

    def _method(
        self, owner: str, function: ast.Attribute, node: ast.Call, where: str, reach: Reach
    ) -> Iterator[Finding]:
        """What a method of a sensitive object does."""
        name, texts = function.attr, [*map(as_text, node.args), None]
        unread = owner == "modules" and name == "get" and not (node.args and is_own_name(node.args[0], read=True))
        if owner in _OF_VARIABLES and name == "setdefault":
            yield Assignment(where, reach, texts[0], texts[1] if texts[0] else None, default=True)
        elif owner in _OF_VARIABLES and name in ("pop", "__setitem__", "__delitem__"):
            yield Assignment(where, reach, texts[0], None)
        elif owner in _OF_VARIABLES and name == "update":
            yield from (each for one in node.args for each in _pairs(one, where, reach))
            yield from (Assignment(where, reach, each.arg, as_text(each.value)) for each in node.keywords)
        elif owner == "path" and name in ("append", "insert", "extend") and node.args:
            yield from self._folders(node.args[-1] if name == "extend" else ast.List([node.args[-1]]), where, reach)
        elif name not in _READERS or unread:
            yield self._escape(owner, function.value, where, reach, read=unread)

    def _sensitive_call(self, word: str, node: ast.Call, where: str, reach: Reach) -> Iterator[Finding]:
        text = as_text(*node.args[:1])
        if word in ("putenv", "unsetenv"):
            yield Assignment(where, reach, text, None)
        elif word in ("import_module", "__import__") and text is not None and not text.startswith("."):
            yield Import(where, reach, text)
        elif word == "reload":
            yield Patch(where, reach, "what it reloads")
        elif word in ("exec", "eval", "import_module", "__import__"):
            yield Barrier(where, reach, _WORDS.get(word, f"calls {word}"))
        elif word != "find_spec" or text is None or "." in text:
            yield self._escape(word, node.func, where, reach)

    def _plain_call(self, node: ast.Call, where: str, reach: Reach) -> Iterator[Finding]:
        """Of a call whose function is not sensitive itself."""
        name = self._qualified(node.func)
        last = name.rpartition(".")[2]
        origin = self._origin(node.func)
        if last in ("setattr", "delattr", "__setattr__", "__delattr__") and node.args:
            if (found := self._origin(node.args[0])) is not None:
                yield Patch(where, reach, *found)
        elif origin and re.match(r"(unittest\.)?mock\b.*\.patch\b", origin[0]):
            yield Patch(where, reach, "what mock.patch names")
        elif last == "getLogger" and node.args:
            text = as_text(node.args[0]) or as_text(self._paths.named.get(getattr(node.args[0], "id", "")))
            if text or (reach > Reach.LATER and self._is_loop_variable(node.args[0])):
                yield Logger(where, reach, text or "")
        elif last in _CHANGES and origin and origin[1] and _of_python(origin[1]):
            changed = origin[0].rpartition(".")[0]
            if ("." in changed and changed != "sys.argv") or isinstance(getattr(node.func, "value", None), ast.Call):
                yield Patch(where, reach, changed, origin[1])
        elif last in ("simplefilter", "filterwarnings") and _action(node) in (None, "error"):
            yield Barrier(where, reach, "makes errors of warnings")
        for text in map(as_text, () if last == "hasattr" else node.args):
            if SENSITIVE.get(text or "") == ANY:
                yield Barrier(where, reach, f"looks for {text}")
        if origin and origin[1] and not _of_python(origin[1]):
            texts = [each for one in (*node.args, *node.keywords) for each in walk(one)]
            words = {*(each.arg or "" for each in node.keywords), *(as_text(each) or "" for each in texts)}
            names = tuple(sorted(filter(_VARIABLE.fullmatch, words)))
            sets = bool(_SETS_VARIABLES.search(last))
            if names or sets or (origin[1].top, reach) not in self._used:
                self._used.add((origin[1].top, reach))
                yield Use(where, reach, origin[1], (None,) if sets else names)
        elif origin is None and _SETS_VARIABLES.search(last) and last not in self._defined:
            yield Assignment(where, reach, None, None)

    def _is_loop_variable(self, node: ast.AST) -> bool:
        """Whether an expression outside of functions is a name that nothing else there gives a value."""
        given = (*self._paths.named, *self._others, "__name__")
        return isinstance(node, ast.Name) and node.id not in given

    def _is_understood(self, given: ast.AST, node: ast.Call) -> bool:
        """Whether a function only reads this argument, which may be sensitive."""
        value = given.value if isinstance(given, ast.keyword) else given
        name = self._qualified(node.func)
        top, _, last = name.partition(".")
        if isinstance(value, ast.Name) and value.id in self._modules:
            if name in _LOOKS:
                shown = name != "getattr" or as_text(*node.args[1:2]) is not None
                return shown or self._others[value.id][0] not in MODULES
            return top == "inspect" or name.endswith("reload")
        if self._sensitive(value) not in _OF_LISTS:
            return False
        if isinstance(given, ast.keyword):
            return given.arg == "env" and top == "subprocess"
        return name.rpartition(".")[2] in _COPIES or (top == "os" and last.startswith(("exec", "spawn", "posix_spawn")))

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
                    self._modules.add(alias.asname or name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    source = Import(self._at(node), Reach.SURE, node.module or "", (alias.name,), node.level)
                    self._others[alias.asname or alias.name] = (f"{node.module or ''}.{alias.name}".strip("."), source)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.Attribute | ast.Name) and (found := self._origin(node.value)):
                    assert found[1] is not None
                    self._others[node.targets[0].id] = (found[0], found[1])
            else:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    self._defined.add(node.name)
                for name in BLOCKS:
                    self._name(getattr(node, name, []))


def _of_python(source: Import) -> bool:
    return not source.level and source.top in sys.stdlib_module_names


def _action(node: ast.Call) -> str | None:
    """What a filter of warnings does."""
    return as_text(*node.args[:1], *(each.value for each in node.keywords if each.arg == "action"))


def _pairs(node: ast.expr | None, where: str, reach: Reach) -> Iterator[Assignment]:
    if not isinstance(node, ast.Dict):
        yield Assignment(where, reach, None, None)
        return
    for key, value in zip(node.keys, node.values, strict=True):
        yield Assignment(where, reach, as_text(key), as_text(value))
