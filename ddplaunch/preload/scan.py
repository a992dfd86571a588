"""What one file of Python source says that matters to whoever imports for it, in the order in which it stands there.

Every reference to what decides about later imports (``syntax.SENSITIVE``) counts by what stands directly around it. In
the few forms that are listed it is read, or changed in a way that the source shows; all others are unknown.
"""

from __future__ import annotations

import _ast as ast
import re
import sys
from collections.abc import Iterator, Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.preload import facts
from ddplaunch.preload.facts import Assignment, Barrier, Certainty, Import, PathEntry, SideEffect, Statement, Use
from ddplaunch.preload.paths import PathExpressions
from ddplaunch.preload.syntax import (
    ANY,
    BLOCKS,
    MODULES,
    SENSITIVE,
    as_text,
    children,
    find_effect,
    is_own_name,
    sensitive_word,
    walk,
)

if TYPE_CHECKING:
    from typing import Any

_READ_METHODS = frozenset({"get", "copy", "items", "keys", "values", "index", "count", "__contains__", "__getitem__"})
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear"})
_COPIES = frozenset({"dict", "list", "tuple", "set", "sorted", "len", "print", "repr", "str", "copy", "deepcopy"})
_LOOKS = frozenset({"hasattr", "dir", "print", "type", "isinstance", "id", "repr"})

_MAPPINGS = frozenset({"environ", "environb"})
_OF_VARIABLES = _MAPPINGS | {"putenv", "unsetenv"}
_READABLE = _MAPPINGS | {"path", "modules", "__dict__"}
_HOOKS = frozenset({"meta_path", "path_hooks", "modules", "__import__", "setdlopenflags", "setLoggerClass"})
_SETS_VARIABLES = re.compile(r"dotenv|(?:set|read|load|patch|update|export|del|put)_?env", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|HOME|LOGNAME|TE?MP|TMPDIR|USER")
_WORDS = {
    **{name: f"calls {name}" for name in ("addsitedir", "exec", "eval", "compile")},
    "run_path": "runs another file",
    "run_module": "runs another module",
    **dict.fromkeys(("import_module", "__import__"), "imports what its source does not show"),
    "path": "changes sys.path",
}


def scan_source(tree: ast.Module, file: str, name: str, *, shared: bool = False) -> tuple[Statement, ...]:
    """Return what the file of this syntax tree and path says, in order.

    Args:
        name: what to call the file.
        shared: other files of the program can import from it.
    """
    return tuple(_Scanner(file, name, shared, tree.body).block(tree.body, Certainty.CERTAIN))


class _Scanner:
    def __init__(self, file: str, name: str, shared: bool, body: list[ast.stmt]) -> None:
        self._file, self._shared = name, shared
        self._imported: dict[str, tuple[str, Import]] = {}  # what names stand for that others may have made
        self._modules = set[str]()  # those of them that are modules
        self._defined = set[str]()  # functions and classes of the file
        self._called = set[tuple[str, Certainty]]()
        self._paths = PathExpressions(file, body)
        self._name(body)

    def _name(self, body: Sequence[ast.AST], *, in_class: bool = False) -> None:
        """Note which names stand for what was imported, wherever that is done, and what is assigned from those."""
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._imported[alias.asname or name] = (name, Import(self._at(node), Certainty.CERTAIN, alias.name))
                    self._modules.add(alias.asname or name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    source = Import(self._at(node), Certainty.CERTAIN, node.module or "", (alias.name,), node.level)
                    self._imported[alias.asname or alias.name] = (f"{source.module}.{alias.name}".strip("."), source)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.Attribute | ast.Name | ast.Call):
                    name, origin = self._resolve(node.value)
                    if origin is not None:
                        self._imported[node.targets[0].id] = (name, origin)
            else:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not in_class:
                    self._defined.add(node.name)
                for block in BLOCKS:
                    self._name(getattr(node, block, []), in_class=isinstance(node, ast.ClassDef))

    def _resolve(self, node: ast.AST) -> tuple[str, Import | None]:
        """The names that lead to what an expression is, and the import of where they begin, if it is another's."""
        match node:
            case ast.Name(id=name):
                builtin = name in ("exec", "eval", "compile") and name not in self._defined
                return self._imported.get(name) or (f"builtins.{name}" if builtin else name, None)
            case ast.Attribute(value=value, attr=name):
                base, source = self._resolve(value)
                return f"{base}.{name}", source
            case ast.Subscript(
                value=ast.Call(func=ast.Name("globals" | "locals" | "vars")), slice=ast.Constant(str(name))
            ):
                return self._resolve(ast.Name(name))
            case ast.Subscript(value=value, slice=key):
                base, source = self._resolve(value)
                text = as_text(key) if sensitive_word(base) == "modules" else None
                return text or f"{base}.[]", source
            case ast.Call(func=ast.Name("getattr"), args=[of, name, *_]):
                base, source = self._resolve(of)
                return f"{base}.{as_text(name)}", source
            case ast.Call(func=ast.Name("vars" | "type" as name), args=[of]):
                base, source = self._resolve(of)
                return f"{base}.__dict__" if name == "vars" else base, source
            case ast.Call(func=function, args=[of, *_]):
                if self._resolve(function)[0].rpartition(".")[2] in ("import_module", "__import__"):
                    name = as_text(of) or "?"
                    return name, Import(self._at(node), Certainty.CERTAIN, name)
        return "?", None

    def _sensitive(self, node: ast.AST) -> str | None:
        """The word of ``SENSITIVE`` that an expression is."""
        if not isinstance(node, ast.Name | ast.Attribute | ast.Call) or getattr(node, "id", None) in self._defined:
            return None
        name, source = self._resolve(node)
        if isinstance(node, ast.Attribute) and node.attr == "__dict__" and source:
            return "vars" if name.removesuffix(".__dict__") in MODULES else "__dict__"
        return sensitive_word(name)

    def _at(self, node: Any) -> str:
        return f"{self._file}:{node.lineno}"

    def block(self, body: Sequence[ast.AST], reach: Certainty) -> Iterator[Statement]:
        for node in body:
            yield from self._statement(node, reach)

    def _statement(self, node: Any, reach: Certainty) -> Iterator[Statement]:
        """Of a statement, or one of the clauses that it has."""
        match node:
            case ast.Import():
                yield from (Import(self._at(node), reach, alias.name) for alias in node.names)
                yield from self._renamed(node, reach)
            case ast.ImportFrom():
                names = tuple(alias.name for alias in node.names)
                yield Import(self._at(node), reach, node.module or "", names, node.level)
                yield from self._renamed(node, reach)
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from self.block(node.orelse, reach)
            case ast.If(test=ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")])):
                yield from self.block(node.body, reach)
            case _:
                if type(node).__name__ in ("Try", "TryStar", "With", "AsyncWith"):
                    reach = min(reach, Certainty.IN_BLOCK)
                yield from self._clause(node, reach)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and reach > Certainty.DEFERRED_CONDITIONAL:
                    reach = Certainty.DEFERRED
                elif isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Match):
                    reach = reach.as_conditional()
                for block in BLOCKS:
                    yield from self.block(getattr(node, block, []), reach)

    def _renamed(self, node: Any, reach: Certainty) -> Iterator[Statement]:
        """Of an import that gives what is sensitive to other files by a name that shows nothing of it."""
        for alias in node.names if self._shared and reach > Certainty.DEFERRED else ():
            name = f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".")
            last = name.rpartition(".")[2]
            other = SENSITIVE.get(last) or alias.asname not in (None, last)
            if other and (last in MODULES or sensitive_word(name)):
                yield Barrier(self._at(node), reach, f"gives {name} another name")

    def _clause(self, node: Any, reach: Certainty) -> Iterator[Statement]:
        """Of a statement without the blocks in it."""
        found = [each for below in children(node) for each in self._expression(below, node, node, reach)]
        # A constant for a variable holds for what is imported before the fork too (Choice.settings).
        shown = [isinstance(each, Assignment) and each.name is not None and each.value is not None for each in found]
        if reach > Certainty.DEFERRED and not (shown and all(shown)) and (effect := find_effect(node)):
            yield SideEffect(self._at(effect), reach)
        yield from found

    def _expression(self, node: Any, parent: Any, outer: Any, reach: Certainty) -> Iterator[Statement]:
        """Of an expression in another, or in a statement; ``outer``: what ``parent`` is in."""
        stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if stored and isinstance(node, ast.Name) and not isinstance(parent, ast.AugAssign):
            return  # a name of the file is given anew
        if word := self._sensitive(node):
            form, given = self._form(node, parent, outer)
            if not (word in _READABLE and _is_read(word, form, given)):
                yield from self._reference(word, node, form, given, reach)
            if not isinstance(node, ast.Call):
                return
        match node:
            case ast.Name(id=name) if name in self._modules:
                yield from self._module(node, parent, reach)
                return
            case ast.Attribute() | ast.Subscript() if stored and not self._sensitive(node.value):
                name, origin = self._resolve(node if isinstance(node, ast.Attribute) else node.value)
                if origin is not None:
                    yield Use(self._at(node), reach, facts.CHANGES, name, origin)
            case ast.Constant(value=str(text)) if SENSITIVE.get(text) == ANY:
                asks = isinstance(parent, ast.Call) and not self._resolve(parent.func)[0].endswith("hasattr")
                if asks or isinstance(parent, ast.Subscript):
                    yield Barrier(self._at(node), reach, f"looks for {text}")
            case ast.Call(func=function):
                if not self._sensitive(function) and not self._sensitive(getattr(function, "value", node)):
                    yield from self._call(node, reach)
        for below in children(node):
            yield from self._expression(below, node, parent, reach)

    def _module(self, node: ast.Name, parent: Any, reach: Certainty) -> Iterator[Statement]:
        """Of a module: others may do anything with it, unless something in it is looked up, or it gets another name."""
        name, source = self._imported[node.id]
        looked_at = isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Assign) and name not in MODULES)
        if isinstance(parent, ast.Call):
            called = self._resolve(parent.func)[0]
            shown = called == "getattr" and (name not in MODULES or as_text(*parent.args[1:2]) is not None)
            looked_at = shown or called in _LOOKS or called.startswith("inspect.")
        if looked_at:
            return
        if name in MODULES:
            yield Barrier(self._at(node), reach, f"passes on {name}")
        else:
            yield Use(self._at(node), reach, facts.PASSES, name, source)

    def _form(self, node: ast.expr, parent: Any, outer: Any) -> tuple[str, Sequence[Any]]:
        """How an expression is used by what stands around it, and the expressions that go with that use."""
        match parent:
            case ast.Subscript(value=value, slice=key) if value is node:
                if isinstance(parent.ctx, ast.Load):
                    return "[]", [key]
                if isinstance(outer, ast.Assign | ast.AugAssign | ast.Delete | ast.Tuple):
                    return "[]=", [
                        key,
                        outer.value if isinstance(outer, ast.Assign) and parent in outer.targets else None,
                    ]
            case ast.Attribute(attr=method) if isinstance(outer, ast.Call) and outer.func is parent:
                return f".{method}", [*outer.args, *outer.keywords]
            case ast.AugAssign(target=target, value=added) if target is node:
                return "+=", [added]
            case ast.Call(func=function, args=args):
                return ("()", args) if function is node else (self._resolve(function)[0], [])
            case ast.keyword(arg="env"):
                return f"env of {self._resolve(outer.func)[0]}", []
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn(), *_]) if left is not node:
                return "in", []
            case ast.comprehension(iter=value) | ast.For(iter=value) | ast.AsyncFor(iter=value) if value is node:
                return "in", []
            case ast.Dict(values=values) if any(key is None and node is values[n] for n, key in enumerate(parent.keys)):
                return "**", []
        return "", []

    def _reference(
        self, word: str, node: ast.expr, form: str, given: Sequence[Any], reach: Certainty
    ) -> Iterator[Statement]:
        """What it means that something sensitive is used, and not just read."""
        where, (name, source) = self._at(node), self._resolve(node)
        text = as_text(*given[:1])
        if word in _OF_VARIABLES:
            if form in (".update", "+=") and all(isinstance(each, ast.Dict | ast.keyword) for each in given):
                pairs = [pair for each in given for pair in _environ_pairs(each)]
            elif form == "[]=" or (form == ".setdefault" and text):
                pairs = [(text, as_text(*given[1:]))]
            else:
                pairs = [(text if form in (".pop", "()") else None, None)]
            for variable, value in pairs:
                yield Assignment(where, reach, variable, value, default=form == ".setdefault")
        elif word == "path" and form in (".append", ".insert", "+="):
            for each in getattr(given[-1], "elts", [None]) if form == "+=" else given[-1:]:
                if path := self._paths.evaluate(each):
                    yield PathEntry(where, reach, path)
                else:
                    yield Barrier(where, reach, "adds to sys.path what its source does not show")
        elif word == "__dict__" and source:
            yield Use(where, reach, facts.CHANGES, name, source)
        elif form == "()" and word in ("import_module", "__import__") and text and not text.startswith("."):
            yield Import(where, reach, text)
        elif form != "()" or word != "find_spec" or not text or "." in text:
            hook = word in _HOOKS and (word, form) not in (("modules", "[]"), ("modules", ".get"), ("__import__", "()"))
            yield Barrier(where, reach, _WORDS.get(word) or f"uses {name.removeprefix('builtins.')}", hook=hook)

    def _call(self, node: ast.Call, reach: Certainty) -> Iterator[Statement]:
        """Of a call whose function is not sensitive itself."""
        where, (name, source) = self._at(node), self._resolve(node.func)
        owner, _, last = name.rpartition(".")
        of_python = source is not None and not source.level and source.top_level_name in sys.stdlib_module_names
        if last in ("setattr", "delattr", "__setattr__", "__delattr__") and node.args:
            target, origin = self._resolve(node.args[0])
            if origin is not None:
                yield Use(where, reach, facts.CHANGES, target, origin)
        elif source and re.match(r"(unittest\.)?mock\b.*\.patch\b", name):
            yield Barrier(where, reach, "changes what mock.patch names")
        elif last == "getLogger" and node.args:
            given = getattr(node.args[0], "id", "")
            if text := as_text(node.args[0]) or as_text(self._paths.named.get(given)):
                yield Use(where, reach, facts.CONFIGURES, text, Import(where, reach, text))
            elif (
                given and reach > Certainty.DEFERRED and given not in (*self._paths.named, *self._imported, "__name__")
            ):
                yield Barrier(where, reach, "may configure any logger")  # of a loop
        elif source and of_python and last in _CHANGES and "." in owner and owner != "sys.argv":
            yield Use(where, reach, facts.CHANGES, owner, source)
        elif last in ("simplefilter", "filterwarnings"):
            action = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "action")]
            if as_text(*action) in (None, "error"):
                yield Barrier(where, reach, "makes errors of warnings")
        if source and not of_python:
            if (source.top_level_name, reach) not in self._called:
                self._called.add((source.top_level_name, reach))
                yield Use(where, reach, facts.CALLS, source.top_level_name, source)
            words = {getattr(each, "arg", None) or as_text(each) or "" for each in walk(node)}
            for word in sorted(filter(_VARIABLE.fullmatch, words)):
                yield Assignment(where, reach, word, source=source)
        if _SETS_VARIABLES.search(last) and not of_python and last not in self._defined:
            yield Assignment(where, reach, source=source)


def _is_read(word: str, form: str, given: Sequence[Any]) -> bool:
    """Whether a use of something sensitive is one that only reads it."""
    if word == "modules" and form in ("[]", "[]=", ".get"):
        return is_own_name(*given[:1], read=form != "[]=")
    if form.startswith("."):
        return form[1:] in _READ_METHODS
    passes = form.rpartition(".")[2] in _COPIES or form.startswith(("os.exec", "os.spawn", "os.posix_spawn"))
    return (
        passes or form in ("[]", "in") or (word in _MAPPINGS and form == "**") or form.startswith("env of subprocess.")
    )


def _environ_pairs(node: Any) -> list[tuple[str | None, str | None]]:
    """The variables and values in a dictionary, or a keyword."""
    if isinstance(node, ast.keyword):
        return [(node.arg, as_text(node.value))]
    return [(as_text(key), as_text(value)) for key, value in zip(node.keys, node.values, strict=True)]
