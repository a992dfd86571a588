"""Options as typed groups: every option is a field, declared once with its spelling, help, default and parser.

``Options`` holds the groups of a command line: ``options[Stopping].grace`` is a value, ``options.sources["grace"]``
where it comes from.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import Any, ClassVar, TypeVar, get_args

import click
import msgspec
from click.shell_completion import CompletionItem
from msgspec import Struct

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import closest_match, join_alternatives

G = TypeVar("G", bound="OptionGroup")

VARIABLE_PREFIX = "DDPLAUNCH_"

Read = Callable[["Option", Any], Any]
"""Converts the text of a value, or the texts of a repeatable option; gets None if the option is not given."""


class OptionSource(Enum):
    """Where the value of an option comes from."""

    TYPED = "typed"
    VARIABLE = "variable"
    FILE = "file"
    HOSTS = "hosts"
    CLUSTER = "surroundings"
    DEFAULT = "default"


_SOURCE_BY_CLICK = {
    "COMMANDLINE": OptionSource.TYPED,
    "ENVIRONMENT": OptionSource.VARIABLE,
    "DEFAULT_MAP": OptionSource.FILE,
}


def value_source(context: click.Context, name: str) -> OptionSource:
    """Return where click found the value of an option."""
    source = context.get_parameter_source(name)
    return _SOURCE_BY_CLICK.get(source.name, OptionSource.DEFAULT) if source else OptionSource.DEFAULT


def format_value(value: Any) -> str:
    """Return the text of a value, as on a command line."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


TIME_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
"""The units of an option's time, in seconds."""


def _format_time(seconds: float) -> str:
    """Return a time with its unit, as an option takes it: "15s", "10m"."""
    unit = next((unit for unit in ("h", "m") if seconds and not seconds % TIME_UNITS[unit]), "s")
    return f"{seconds / TIME_UNITS[unit]:g}{unit}"


def option_words(spelling: str, text: str) -> tuple[str, ...]:
    """Return an option and its value as words of a command line; "--name=value" if the value begins with a dash."""
    return (f"{spelling}={text}",) if text.startswith("-") else (spelling, text)


class Option(Struct, frozen=True):
    """Declaration of a command-line option, or of an argument, in the ``Annotated`` type of an option group's field."""

    spelling: str  # "-m --module", "--grace TIME"; a metavar in lower case is the list of valid values: "tcp|none"
    help: str = ""
    read: Read | None = None
    write: Callable[[Any], str] = format_value  # the inverse of ``read``
    envvar: str | None = None  # the environment variable, if its name is not made from the spelling; see ``variable``
    has_variable: bool = True
    off: str | None = None  # the spelling for "no" of a flag with three states: yes, no, unset
    completion: str | None = None  # how a shell completes its value: as "file", "folder" or "any" path
    is_common: bool = False  # it is in the short help too
    in_project: bool = False  # a project's pyproject.toml may set it; never if it runs a command or connects to a host
    in_user_file: bool = False  # the user's own ddplaunch.toml may set it, in its table [run]
    is_local: bool = False  # the commands of the other nodes are made without it
    # These are filled in from the field that declares the option:
    name: str = ""
    default: Any = None
    is_flag: bool = False
    multiple: bool = False  # it may be repeated; for an argument: it takes all remaining words

    @property
    def opts(self) -> list[str]:
        """The spellings of the option, the longest last: "-m", "--module"."""
        return [word for word in self.spelling.split() if word.startswith("-")] or [self.name]

    @property
    def variable(self) -> str | None:
        """The environment variable that sets the option if the command line does not: DDPLAUNCH_NPROC."""
        if self.is_argument or not self.has_variable:
            return None
        return self.envvar or VARIABLE_PREFIX + self.opts[-1].strip("-").replace("-", "_").upper()

    @property
    def metavar(self) -> str | None:
        return next((word for word in self.spelling.split() if not word.startswith("-")), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """The valid values of an option that accepts only a few words; () for any other option."""
        return tuple(self.metavar.split("|")) if self.metavar and self.metavar.islower() else ()

    @property
    def is_argument(self) -> bool:
        return not self.spelling.startswith("-")

    def to_argv(self, value: Any) -> Iterator[str]:
        """Return the words of this option for a command line, from its parsed value."""
        if self.off:
            yield self.opts[-1] if value else self.off
        elif self.is_flag:
            yield from self.opts[-1:] * value  # False where a variable has switched it off
        else:
            for each in value if self.multiple else (value,):
                yield from option_words(self.opts[-1], self.write(each))

    def to_click(self) -> click.Parameter:
        """Return this option as an option, or an argument, of click."""
        kind: click.ParamType[Any] | None = None
        if self.is_argument:
            return click.Argument([self.name], nargs=-1 if self.multiple else 1, type=PathType())
        if self.choices:
            kind = ChoiceType(self.choices)
        elif self.completion:
            kind = PathType(file_okay=self.completion != "folder", dir_okay=self.completion != "file")
        how: dict[str, Any] = {"help": self.help, "envvar": self.variable}
        if self.is_flag:
            if self.off:
                return click.Option([f"{self.opts[-1]}/{self.off}", self.name], type=FlagType(), default=None, **how)
            return click.Option([*self.opts, self.name], is_flag=True, type=FlagType(), **how)
        if self.read is not None:
            how["callback"] = self._read_for_click
        if self.multiple and kind is None:
            kind = _RepeatableTextType()
        if self.default is not None and not self.multiple:
            text = _format_time(self.default) if self.metavar == "TIME" else self.write(self.default)
            how |= {"default": text, "show_default": True}
        metavar = None if self.choices else self.metavar
        return click.Option([*self.opts, self.name], metavar=metavar, type=kind, multiple=self.multiple, **how)

    def _read_for_click(self, context: click.Context, param: click.Parameter, text: Any) -> Any:
        """Convert the text that click has parsed; an error in an environment variable names the variable."""
        assert self.read is not None
        try:
            return self.read(self, text)
        except UsageError as error:
            if value_source(context, self.name) is not OptionSource.VARIABLE:
                raise
            raise UsageError(error.message.replace(f"{self.opts[-1]} ", f"{self.variable}=", 1), error.hint) from None


class _RepeatableTextType(click.types.StringParamType):
    """Type of a repeatable option: an environment variable sets one value, and is not split at spaces as in click."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


class OptionGroup(Struct, frozen=True):
    """Base class of groups of options on one subject, which are listed together in the help."""

    heading: ClassVar[str] = "Other"
    """The heading above these options in the help."""

    after: ClassVar[str] = ""
    """For a feature's group: the option, by its Python name, that it follows in the help."""

    def check_target(self, options: Options) -> None:
        """Raise UsageError if these options do not fit the target; ``submit`` too calls this before it submits."""

    def check_contradictions(self, options: Options) -> None:
        """Raise UsageError if these options contradict each other or others; values of the cluster are filled in."""


@cache
def declared_options(kind: type[OptionGroup]) -> tuple[Option, ...]:
    """Return the options of a group, each with the name, default and type of its field."""
    options = []
    for name, default in zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True):
        value_type, option = get_args(kind.__annotations__[name])
        is_flag = value_type in (bool, bool | None)
        multiple = value_type == tuple[str, ...]
        options.append(msgspec.structs.replace(option, name=name, default=default, is_flag=is_flag, multiple=multiple))
    return tuple(options)


class Options:
    """The values of the options in all groups, and the source of each value; immutable."""

    def __init__(self, groups: Mapping[type[OptionGroup], OptionGroup], sources: Mapping[str, OptionSource]) -> None:
        """``sources`` maps the name of each option to the source of its value."""
        self._groups = groups
        self.sources = sources

    @classmethod
    def from_click(
        cls, kinds: Iterable[type[OptionGroup]], context: click.Context, from_variables: Collection[str] = ()
    ) -> Options:
        """Create from the values that click has parsed; options that the command does not have keep their defaults.

        ``from_variables``: spellings of options that come from a variable although click found them in the words.
        """
        groups: dict[type[OptionGroup], OptionGroup] = {}
        sources: dict[str, OptionSource] = {}
        for kind in kinds:
            options = declared_options(kind)
            groups[kind] = kind(**{each.name: context.params.get(each.name, each.default) for each in options})
            for each in options:
                is_variable = any(spelling in from_variables for spelling in each.opts)
                sources[each.name] = OptionSource.VARIABLE if is_variable else value_source(context, each.name)
        return cls(groups, sources)

    def __getitem__(self, kind: type[G]) -> G:
        """Return the values of a group of options; their defaults if the command does not have this group."""
        group = self._groups.get(kind)
        return group if isinstance(group, kind) else kind()

    def value(self, name: str) -> Any:
        """Return the value of an option by name; None if no group has it, as when its feature is not installed."""
        return next((getattr(each, name) for each in self._groups.values() if name in each.__struct_fields__), None)

    def check_target(self) -> None:
        """Raise UsageError if options do not fit the target."""
        for group in self._groups.values():
            group.check_target(self)

    def check_contradictions(self) -> None:
        """Raise UsageError if options contradict each other; needs the values from the cluster environment."""
        for group in self._groups.values():
            group.check_contradictions(self)

    def is_set(self, name: str) -> bool:
        """Whether the user has set an option, on the command line or by a variable; False if no such option exists."""
        return self.sources.get(name) in (OptionSource.TYPED, OptionSource.VARIABLE)

    @property
    def names_from_cluster(self) -> tuple[str, ...]:
        """The options whose values come from the cluster environment."""
        return tuple(name for name, source in self.sources.items() if source is OptionSource.CLUSTER)

    def with_values(self, source: OptionSource, changes: Mapping[str, object]) -> Options:
        """Return a copy with the values in ``changes``, keyed by option name, and ``source`` as their source."""
        assert changes.keys() <= self.sources.keys()
        groups = {
            kind: msgspec.structs.replace(group, **{n: changes[n] for n in kind.__struct_fields__ if n in changes})
            for kind, group in self._groups.items()
        }
        return Options(groups, {**self.sources, **dict.fromkeys(changes, source)})

    def with_defaults(self, source: OptionSource, defaults: Mapping[str, object]) -> Options:
        """Return a copy in which ``defaults`` fill in the options that the user has not set; None values are skipped.

        A project's defaults have precedence over the cluster environment, but not over --hosts.
        """
        preceding = {OptionSource.TYPED, OptionSource.VARIABLE}
        if source is OptionSource.CLUSTER:
            preceding.add(OptionSource.FILE)
        unset = {n: value for n, value in defaults.items() if value is not None and self.sources[n] not in preceding}
        return self.with_values(source, unset)

    def to_argv(self, excluded: Collection[str]) -> Iterator[str]:
        """Yield the words of the options that the user or a file has set, without ``excluded`` and local options."""
        for kind, group in self._groups.items():
            for option in declared_options(kind):
                is_chosen = self.is_set(option.name) or self.sources[option.name] is OptionSource.FILE
                if is_chosen and not (option.is_argument or option.is_local or option.name in excluded):
                    yield from option.to_argv(getattr(group, option.name))


class PathType(click.Path):
    """Type of click for paths: accepts any text; a shell completes it as a path, or as a function in a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        path, colon, name = incomplete.rpartition(":")
        if param.name == "target" and colon and path.endswith(".py"):
            return [CompletionItem(f"{path}:{each}") for each in _list_public_functions(path) if each.startswith(name)]
        return super().shell_complete(ctx, param, incomplete)


def _list_public_functions(path: str) -> list[str]:
    """List the public functions of a Python file, without running it."""
    try:
        with open(path, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [each.name for each in body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]


class ChoiceType(click.Choice):  # type: ignore[type-arg]  # not generic before click 8.2
    """Type of click for an option with a few valid words; the error for any other word suggests the closest one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices or param is None or ctx is None:
            return value
        name, near = param.opts[-1], closest_match(value, self.choices)
        by_variable = value_source(ctx, param.name or "") is OptionSource.VARIABLE
        given = f"{param.envvar}=" if by_variable else f"{name} "
        what = f"{given}{sanitize_line(value, 60)}: expected {join_alternatives(self.choices)}"
        raise UsageError(what, f"did you mean {name} {near}?" if near else f"{ctx.command_path} --help shows more")


class FlagType(click.types.BoolParamType):
    """Type of click for flags; an invalid value of the environment variable that sets one is a UsageError."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            if param is None or ctx is None:
                raise
            what = f"{param.envvar}={sanitize_line(value, 60)}: expected 1 or 0"
            raise UsageError(what, f"{ctx.command_path} --help shows more") from None
