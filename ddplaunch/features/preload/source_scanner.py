"""Scans one file of Python source for the statements that matter to preloading (``statements``), in source order.

Every use of a sensitive name (``syntax.SENSITIVE``: it decides about later imports) is judged by the expression
directly around it. A few listed forms only read it, or change it in a way that the source shows; others are barriers.
"""

from __future__ import annotations

import _ast as ast
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ddplaunch.features.preload import statements
from ddplaunch.features.preload.path_expressions import PathExpressions
from ddplaunch.features.preload.statements import (
    Assignment,
    Barrier,
    Certainty,
    Import,
    PathEntry,
    SideEffect,
    Statement,
    Use,
)
from ddplaunch.features.preload.syntax import (
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

_READING_METHODS = frozenset(
    {"get", "copy", "items", "keys", "values", "index", "count", "__contains__", "__getitem__"}
)
_CHANGING_METHODS = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "clear"})
_COPYING_CALLS = frozenset(
    {"dict", "list", "tuple", "set", "sorted", "len", "print", "repr", "str", "copy", "deepcopy"}
)
_INSPECTING_CALLS = frozenset({"hasattr", "dir", "print", "type", "isinstance", "id", "repr"})

_MAPPINGS = frozenset({"environ", "environb"})
_ENVIRONMENT = _MAPPINGS | {"putenv", "unsetenv"}
_READABLE = _MAPPINGS | {"path", "modules", "__dict__"}
_HOOKS = frozenset({"meta_path", "path_hooks", "modules", "__import__", "setdlopenflags", "setLoggerClass"})
_SETS_VARIABLES = re.compile(r"dotenv|(?:set|read|load|patch|update|export|del|put)_?env", re.IGNORECASE)
_VARIABLE_NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|HOME|LOGNAME|TE?MP|TMPDIR|USER")
_REASONS = {
    **{name: f"calls {name}" for name in ("addsitedir", "exec", "eval", "compile")},
    "run_path": "runs another file",
    "run_module": "runs another module",
    **dict.fromkeys(("import_module", "__import__"), "imports a module that its source does not show"),
    "path": "changes sys.path",
}


def scan_source(tree: ast.Module, file: str, name: str, *, shared: bool = False) -> tuple[Statement, ...]:
    """Return the statements of a file that matter to preloading, in order.

    Args:
        tree: its syntax tree.
        file: its path.
        name: its name in messages.
        shared: whether other files of the program can import from it.
    """
    return tuple(_Scanner(file, name, shared, tree.body).block(tree.body, Certainty.CERTAIN))


class _Scanner:
    def __init__(self, file: str, name: str, shared: bool, body: list[ast.stmt]) -> None:
        self._file, self._shared = name, shared
        self._imported: dict[str, tuple[str, Import]] = {}  # by local name: the qualified name, and its import
        self._modules = set[str]()  # the names in ``_imported`` that are modules
        self._defined = set[str]()  # functions and classes of the file
        self._called = set[tuple[str, Certainty]]()  # packages whose functions are called, noted once
        self._paths = PathExpressions(file, body)
        self._collect_names(body)

    def _collect_names(self, body: Sequence[ast.AST], *, in_class: bool = False) -> None:
        """Collect the names that are imported anywhere in the file, and the names that these are assigned to."""
        for node in body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._imported[alias.asname or name] = (
                        name,
                        Import(self._location(node), Certainty.CERTAIN, alias.name),
                    )
                    self._modules.add(alias.asname or name)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    source = Import(
                        self._location(node), Certainty.CERTAIN, node.module or "", (alias.name,), node.level
                    )
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
                    self._collect_names(getattr(node, block, []), in_class=isinstance(node, ast.ClassDef))

    def _resolve(self, node: ast.AST) -> tuple[str, Import | None]:
        """Return the qualified name of an expression, and the import that its first name comes from, if any."""
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
                    return name, Import(self._location(node), Certainty.CERTAIN, name)
        return "?", None

    def _sensitive(self, node: ast.AST) -> str | None:
        """Return the word of ``SENSITIVE`` that an expression refers to, or None."""
        if not isinstance(node, ast.Name | ast.Attribute | ast.Call) or getattr(node, "id", None) in self._defined:
            return None
        name, source = self._resolve(node)
        if isinstance(node, ast.Attribute) and node.attr == "__dict__" and source:
            return "vars" if name.removesuffix(".__dict__") in MODULES else "__dict__"
        return sensitive_word(name)

    def _location(self, node: Any) -> str:
        return f"{self._file}:{node.lineno}"

    def block(self, body: Sequence[ast.AST], certainty: Certainty) -> Iterator[Statement]:
        for node in body:
            yield from self._scan_statement(node, certainty)

    def _scan_statement(self, node: Any, certainty: Certainty) -> Iterator[Statement]:
        """Scan a statement, or a clause of one, with its blocks."""
        match node:
            case ast.Import():
                yield from (Import(self._location(node), certainty, alias.name) for alias in node.names)
                yield from self._scan_renaming_import(node, certainty)
            case ast.ImportFrom():
                names = tuple(alias.name for alias in node.names)
                yield Import(self._location(node), certainty, node.module or "", names, node.level)
                yield from self._scan_renaming_import(node, certainty)
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from self.block(node.orelse, certainty)
            case ast.If(test=ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")])):
                yield from self.block(node.body, certainty)
            case _:
                if type(node).__name__ in ("Try", "TryStar", "With", "AsyncWith"):
                    certainty = min(certainty, Certainty.IN_BLOCK)
                yield from self._scan_clause(node, certainty)
                if (
                    isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    and certainty > Certainty.DEFERRED_CONDITIONAL
                ):
                    certainty = Certainty.DEFERRED
                elif isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Match):
                    certainty = certainty.as_conditional()
                for block in BLOCKS:
                    yield from self.block(getattr(node, block, []), certainty)

    def _scan_renaming_import(self, node: Any, certainty: Certainty) -> Iterator[Statement]:
        """Scan an import that renames something sensitive: other files can then import it by an unsuspicious name."""
        for alias in node.names if self._shared and certainty > Certainty.DEFERRED else ():
            name = f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".")
            last = name.rpartition(".")[2]
            is_hidden = SENSITIVE.get(last) or alias.asname not in (None, last)
            if is_hidden and (last in MODULES or sensitive_word(name)):
                yield Barrier(self._location(node), certainty, f"renames {name}")

    def _scan_clause(self, node: Any, certainty: Certainty) -> Iterator[Statement]:
        """Scan a statement without its blocks."""
        found = [each for below in children(node) for each in self._scan_expression(below, node, node, certainty)]
        # Variables with known values are no side effect: the zygote sets them before it imports (ZygotePlan.settings).
        known = [isinstance(each, Assignment) and each.name is not None and each.value is not None for each in found]
        if certainty > Certainty.DEFERRED and not (known and all(known)) and (effect := find_effect(node)):
            yield SideEffect(self._location(effect), certainty)
        yield from found

    def _scan_expression(self, node: Any, parent: Any, outer: Any, certainty: Certainty) -> Iterator[Statement]:
        """Scan an expression; ``parent``: the expression or statement that it is in; ``outer``: the parent of that."""
        stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if stored and isinstance(node, ast.Name) and not isinstance(parent, ast.AugAssign):
            return  # assigns to a name of this file
        if word := self._sensitive(node):
            form, operands = self._classify_use(node, parent, outer)
            if not (word in _READABLE and _is_read_only(word, form, operands)):
                yield from self._scan_sensitive_use(word, node, form, operands, certainty)
            if not isinstance(node, ast.Call):
                return
        match node:
            case ast.Name(id=name) if name in self._modules:
                yield from self._scan_module_use(node, parent, certainty)
                return
            case ast.Attribute() | ast.Subscript() if stored and not self._sensitive(node.value):
                name, origin = self._resolve(node if isinstance(node, ast.Attribute) else node.value)
                if origin is not None:
                    yield Use(self._location(node), certainty, statements.CHANGES, name, origin)
            case ast.Constant(value=str(text)) if SENSITIVE.get(text) == ANY:
                is_argument = isinstance(parent, ast.Call) and not self._resolve(parent.func)[0].endswith("hasattr")
                if is_argument or isinstance(parent, ast.Subscript):
                    yield Barrier(self._location(node), certainty, f"looks for {text}")
            case ast.Call(func=function):
                if not self._sensitive(function) and not self._sensitive(getattr(function, "value", node)):
                    yield from self._call(node, certainty)
        for below in children(node):
            yield from self._scan_expression(below, node, parent, certainty)

    def _scan_module_use(self, node: ast.Name, parent: Any, certainty: Certainty) -> Iterator[Statement]:
        """Scan a use of a module: anything may be done with it, unless an attribute is read, or it is only renamed."""
        name, source = self._imported[node.id]
        is_harmless = isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Assign) and name not in MODULES)
        if isinstance(parent, ast.Call):
            called = self._resolve(parent.func)[0]
            shown = called == "getattr" and (name not in MODULES or as_text(*parent.args[1:2]) is not None)
            is_harmless = shown or called in _INSPECTING_CALLS or called.startswith("inspect.")
        if is_harmless:
            return
        if name in MODULES:
            yield Barrier(self._location(node), certainty, f"passes on {name}")
        else:
            yield Use(self._location(node), certainty, statements.PASSES, name, source)

    def _classify_use(self, node: ast.expr, parent: Any, outer: Any) -> tuple[str, Sequence[Any]]:
        """Return how an expression is used, as "[]=", ".update" or "()", and the operands of that use."""
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

    def _scan_sensitive_use(
        self, word: str, node: ast.expr, form: str, operands: Sequence[Any], certainty: Certainty
    ) -> Iterator[Statement]:
        """Scan a use of something sensitive that is more than reading it."""
        where, (name, source) = self._location(node), self._resolve(node)
        text = as_text(*operands[:1])
        if word in _ENVIRONMENT:
            if form in (".update", "+=") and all(isinstance(each, ast.Dict | ast.keyword) for each in operands):
                pairs = [pair for each in operands for pair in _environ_pairs(each)]
            elif form == "[]=" or (form == ".setdefault" and text):
                pairs = [(text, as_text(*operands[1:]))]
            else:
                pairs = [(text if form in (".pop", "()") else None, None)]
            for variable, value in pairs:
                yield Assignment(where, certainty, variable, value, default=form == ".setdefault")
        elif word == "path" and form in (".append", ".insert", "+="):
            for each in getattr(operands[-1], "elts", [None]) if form == "+=" else operands[-1:]:
                if path := self._paths.evaluate(each):
                    yield PathEntry(where, certainty, path)
                else:
                    yield Barrier(where, certainty, "adds a folder to sys.path that its source does not show")
        elif word == "__dict__" and source:
            yield Use(where, certainty, statements.CHANGES, name, source)
        elif form == "()" and word in ("import_module", "__import__") and text and not text.startswith("."):
            yield Import(where, certainty, text)
        elif form != "()" or word != "find_spec" or not text or "." in text:
            hook = word in _HOOKS and (word, form) not in (("modules", "[]"), ("modules", ".get"), ("__import__", "()"))
            yield Barrier(where, certainty, _REASONS.get(word) or f"uses {name.removeprefix('builtins.')}", hook=hook)

    def _call(self, node: ast.Call, certainty: Certainty) -> Iterator[Statement]:
        """Scan a call of a function that is not sensitive itself."""
        where, (name, source) = self._location(node), self._resolve(node.func)
        owner, _, last = name.rpartition(".")
        is_stdlib = source is not None and not source.level and source.top_level_name in sys.stdlib_module_names
        if last in ("setattr", "delattr", "__setattr__", "__delattr__") and node.args:
            target, origin = self._resolve(node.args[0])
            if origin is not None:
                yield Use(where, certainty, statements.CHANGES, target, origin)
        elif source and re.match(r"(unittest\.)?mock\b.*\.patch\b", name):
            yield Barrier(where, certainty, "calls mock.patch")
        elif last == "getLogger" and node.args:
            variable = getattr(node.args[0], "id", "")
            if text := as_text(node.args[0]) or as_text(self._paths.named.get(variable)):
                yield Use(where, certainty, statements.CONFIGURES, text, Import(where, certainty, text))
            elif (
                variable
                and certainty > Certainty.DEFERRED
                and variable not in (*self._paths.named, *self._imported, "__name__")
            ):
                yield Barrier(where, certainty, "may configure any logger")  # as in a loop over names
        elif source and is_stdlib and last in _CHANGING_METHODS and "." in owner and owner != "sys.argv":
            yield Use(where, certainty, statements.CHANGES, owner, source)
        elif last in ("simplefilter", "filterwarnings"):
            action = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "action")]
            if as_text(*action) in (None, "error"):
                yield Barrier(where, certainty, "turns warnings into errors")
        if source and not is_stdlib:
            if (source.top_level_name, certainty) not in self._called:
                self._called.add((source.top_level_name, certainty))
                yield Use(where, certainty, statements.CALLS, source.top_level_name, source)
            words = {getattr(each, "arg", None) or as_text(each) or "" for each in walk(node)}
            for word in sorted(filter(_VARIABLE_NAME.fullmatch, words)):
                yield Assignment(where, certainty, word, source=source)
        if _SETS_VARIABLES.search(last) and not is_stdlib and last not in self._defined:
            yield Assignment(where, certainty, source=source)


def _is_read_only(word: str, form: str, operands: Sequence[Any]) -> bool:
    """Whether a use of something sensitive only reads it."""
    if word == "modules" and form in ("[]", "[]=", ".get"):
        return is_own_name(*operands[:1], read=form != "[]=")
    if form.startswith("."):
        return form[1:] in _READING_METHODS
    copies = form.rpartition(".")[2] in _COPYING_CALLS or form.startswith(("os.exec", "os.spawn", "os.posix_spawn"))
    return (
        copies or form in ("[]", "in") or (word in _MAPPINGS and form == "**") or form.startswith("env of subprocess.")
    )


def _environ_pairs(node: Any) -> list[tuple[str | None, str | None]]:
    """The variables and values in a dictionary display, or of a keyword argument."""
    if isinstance(node, ast.keyword):
        return [(node.arg, as_text(node.value))]
    return [(as_text(key), as_text(value)) for key, value in zip(node.keys, node.values, strict=True)]
