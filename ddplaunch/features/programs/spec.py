"""What is known of a program before it starts: its command, its kind, and what it waits for; and how that is checked.

A program travels as JSON in ``--program``, so that every node of a job gets it with the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct, field

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.text import closest_match, join_alternatives, join_names
from ddplaunch.base.types import WEEK_S, parse
from ddplaunch.core.option_values import parse_seconds
from ddplaunch.system.plan.numbers import parse_int
from ddplaunch.system.plan.rank_layout import MAX_NODES

Kind = Literal["main", "service", "sidecar"]
"""The job is done when all mains have returned 0; a service must live until then; a sidecar's end does not matter."""

KINDS: tuple[str, ...] = get_args(Kind)
DEFAULT_READY_TIMEOUT_S = 1800.0
DEFAULT_GRACE_S = 30.0
MAX_COPIES, MAX_RESTARTS = 256, 10**6
OWN_FIELDS = ("port", "host", "address")
"""Placeholders of a program for itself, so no program has such a name."""

_NAME = r"[A-Za-z][A-Za-z0-9_-]{0,60}"
_READY = re.compile(r"(tcp)(?::(\d+))?|(http):(\d+)?(/\S*)|(line):(.+)|(file):(.+)", re.DOTALL)


class Condition(NamedTuple):
    """The condition under which a program is ready: what is checked, and the fixed port, if one is named."""

    kind: str  # "tcp", "http", "line", "file"; "": ready once it has started
    what: str  # the path, or the text
    port: int | None


class ProgramSpec(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One program beside the ranks; with ``is_target``, the settings of the ranks' own program."""

    name: str  # unique in the job; the prefix of its lines
    command: tuple[str, ...]
    kind: Kind = "service"
    ready: str = ""  # "tcp", "http:/PATH", "line:TEXT", "file:PATH"; "": it is ready once it has started
    ready_timeout_s: float = DEFAULT_READY_TIMEOUT_S
    after: tuple[str, ...] | None = None  # the programs that must be ready before it starts; None: see ``order``
    env: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = DEFAULT_GRACE_S  # between SIGTERM and SIGKILL
    gpus: int | str = ""  # how many, "all", or a list as that of --gpus
    nice: int = 0
    cwd: str = ""
    hold: bool = True  # whether its ports are held until it listens
    restarts: int = 0  # how often it may start again alone after a failure
    beside: str = ""  # the program on whose nodes it runs
    each_node: bool = False  # whether it runs on all nodes of the job
    count: int = 1  # how many processes it has on each of its nodes
    nodes: int = 0  # how many nodes it has for itself, one process on each; 0: it is on node 0. Of the target: 0 is all
    is_target: bool = False
    is_world: bool = False  # a target with ranks and a store of its own: ``command`` are the words of a further ``run``

    @property
    def outlives_attempts(self) -> bool:
        """Whether the program keeps running when the ranks are restarted."""
        return self.kind == "sidecar"

    @property
    def condition(self) -> Condition:
        """The condition under which the program counts as ready."""
        found = _READY.fullmatch(self.ready)
        if found is None:
            return Condition("", "", None)
        tcp, tcp_port, http, http_port, path, line, text, file, name = found.groups()
        port = tcp_port or http_port
        return Condition(tcp or http or line or file, path or text or name or "", int(port) if port else None)

    @property
    def has_fixed_nodes(self) -> bool:
        """Whether the program needs a job with a fixed number of nodes."""
        return bool(self.nodes or self.each_node or self.beside)

    @property
    def shown_command(self) -> tuple[str, ...]:
        """The command of the program, as users know it."""
        return ("ddplaunch", "run", *self.command) if self.is_world else self.command

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the program in which placeholders are replaced."""
        return (*self.command, *self.env.values())


class Programs(NamedTuple):
    """All programs of a job, except the sidecars of ``--sidecar`` and ``--tensorboard``."""

    beside: tuple[ProgramSpec, ...]
    target: ProgramSpec

    def find(self, name: str) -> ProgramSpec | None:
        return next((each for each in (*self.beside, self.target) if each.name == name), None)

    @property
    def gate(self) -> tuple[str, ...]:
        """The programs that the ranks wait for: all services, unless ``after`` names others."""
        if self.target.after is not None:
            return self.target.after
        return tuple(each.name for each in self.beside if each.kind == "service")


def decode_programs(texts: Sequence[str], target_name: str) -> Programs | None:
    """Return the programs of ``--program``; None without any. Raises UsageError if one is not valid JSON."""
    if not texts:
        return None
    try:
        specs = [parse(text, ProgramSpec) for text in texts]
    except ProtocolError as error:
        hint = "write `:` between programs, or a job file"
        raise UsageError(f"--program: not a program: {sanitize_line(str(error))}", hint) from None
    target = next((each for each in specs if each.is_target), ProgramSpec(target_name, (), "main", is_target=True))
    return Programs(tuple(each for each in specs if not each.is_target), target)


def encode_program(spec: ProgramSpec) -> str:
    """Return the word ``--program=JSON`` that describes a program on a command line."""
    return f"--program={msgspec.json.encode(spec).decode()}"


Place = Callable[[str], str]
"""Names a key in a message: "--kind", or "rl.toml:3: programs.vllm.kind"."""


class SpecReader:
    """Reads the values of one program: texts of a command line, or values of a job file. Raises UsageError."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def _error(self, key: str, value: object, expected: str) -> UsageError:
        return UsageError(f"{self._place(key)} {sanitize_line(str(value), 60)}: expected {expected}")

    def name(self, value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(_NAME, value):
            raise self._error("name", value, "a letter, then letters, digits, dashes and underscores")
        if value in OWN_FIELDS or re.fullmatch(r"rank-\d+|sidecar-.*", value):
            raise UsageError(f"{self._place('name')} {value}: the name is taken", "give the program another name")
        return value

    def kind(self, value: object) -> Kind:
        if value in KINDS:
            return value  # type: ignore[return-value]
        near = closest_match(str(value), KINDS)
        hint = f"did you mean {near}?" if near else None
        raise UsageError(self._error("kind", value, join_alternatives(KINDS)).message, hint)

    def ready(self, value: object) -> str:
        if value == "none":
            return ""
        if isinstance(value, str) and _READY.fullmatch(value):
            return value
        raise self._error("ready", value, "http:/PATH, tcp, line:TEXT, file:PATH or none")

    def seconds(self, key: str, value: object) -> float:
        read = parse_seconds(value) if isinstance(value, str) else value
        if isinstance(read, bool) or not isinstance(read, int | float) or not 0 <= read <= WEEK_S:
            raise self._error(key, value, "a time from 0 up to a week, like 2.5 (seconds), 10m or 2h")
        return float(read)

    def after(self, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [] if value == "none" else [each.strip() for each in value.split(",")]
        if isinstance(value, list) and all(isinstance(each, str) and each for each in value):
            return tuple(dict.fromkeys(value))
        raise self._error("after", value, "names of programs")

    def env(self, value: object) -> dict[str, str]:
        if isinstance(value, dict) and all(isinstance(each, str | int) for each in value.values()):
            return {name: str(each) for name, each in value.items()}
        raise self._error("env", value, 'variables, like { NAME = "value" }')

    def nice(self, value: object) -> int:
        read = parse_int(value) if isinstance(value, str) else value
        if isinstance(read, bool) or not isinstance(read, int) or not -20 <= read <= 19:
            raise self._error("nice", value, "a number from -20 to 19")
        return read

    def number(self, key: str, value: object, least: int, most: int) -> int:
        read = parse_int(value) if isinstance(value, str) else value
        if isinstance(read, bool) or not isinstance(read, int) or not least <= read <= most:
            raise self._error(key, value, f"a number from {least} to {most}")
        return read

    def nodes(self, value: object) -> int:
        return self.number("nodes", value, 1, MAX_NODES)

    def count(self, value: object) -> int:
        return self.number("count", value, 1, MAX_COPIES)

    def restarts(self, value: object) -> int:
        return self.number("restarts", value, 0, MAX_RESTARTS)

    def gpus(self, value: object) -> int | str:
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if is_count or (isinstance(value, str) and value):
            return value  # type: ignore[return-value]
        raise self._error("gpus", value, 'a number, "all", or a list like "0-3"')

    def text(self, key: str, value: object) -> str:
        if isinstance(value, str) and value and "\0" not in value:
            return value
        raise self._error(key, value, "a text")

    def flag(self, key: str, value: object) -> bool:
        if isinstance(value, bool):
            return value
        raise self._error(key, value, "true or false")


def check_programs(programs: Programs, place: Callable[[str, str], str]) -> None:
    """Raise UsageError if names are used twice or unknown, or programs wait for each other in a circle.

    ``place`` names a key of a program in a message.
    """
    specs = (*programs.beside, programs.target)
    names = [each.name for each in specs]
    variables = [each.replace("-", "_").upper() for each in names]
    for name, variable in zip(names, variables, strict=True):
        if names.count(name) > 1:
            raise UsageError(f"two programs are named {name}", "--name NAME gives one another name")
        if variables.count(variable) > 1:
            others = join_names(each for each in names if each.replace("-", "_").upper() == variable)
            raise UsageError(f"{others} have the same variable, DDPLAUNCH_{variable}_ADDRESS", "rename one of them")
    for spec in specs:
        for other in spec.after or ():
            if other not in names or other == spec.name:
                what = f'{place(spec.name, "after")}: no program named "{other}"'
                near = closest_match(other, set(names) - {spec.name})
                what = f"{place(spec.name, 'after')}: {other} is the program itself" if other == spec.name else what
                raise UsageError(what, f"did you mean {near}?" if near else f"programs: {join_names(names)}")
            if other == programs.target.name:
                what = f"{place(spec.name, 'after')}: nothing can come after {other}, which has the ranks"
                raise UsageError(what, "leave it out")
    for spec in programs.beside:
        _check_places(spec, programs, place)
    if circle := _find_circle(specs):
        raise UsageError(f"{join_names(circle)} come after each other", f"change `after` of {circle[0]}")


def _check_places(spec: ProgramSpec, programs: Programs, place: Callable[[str, str], str]) -> None:
    """Raise UsageError if keys that place a program contradict each other."""
    other = programs.find(spec.beside)
    if spec.beside and other is None:
        names = [each.name for each in (*programs.beside, programs.target) if each is not spec]
        near = closest_match(spec.beside, names)
        what = f'{place(spec.name, "with")}: no program named "{spec.beside}"'
        raise UsageError(what, f"did you mean {near}?" if near else f"programs: {join_names(names)}")
    if other and other.beside:
        raise UsageError(f"{place(spec.name, 'with')}: {other.name} is itself with {other.beside}", "name that one")
    if sum(map(bool, (spec.nodes, spec.beside, spec.each_node))) > 1:
        raise UsageError(f"{spec.name}: nodes, with and each-node contradict each other", "give one of them")
    if spec.count > 1 and spec.is_world:
        what = f"{place(spec.name, 'count')} {spec.count}: a target has ranks, no copies"
        raise UsageError(what, "--nproc in the target gives their number")
    if spec.count > 1 and spec.condition.port is not None:
        what = f"{place(spec.name, 'count')} {spec.count}: they cannot all have port {spec.condition.port}"
        raise UsageError(what, "write {port} in the command: each has its own")


def _find_circle(specs: Iterable[ProgramSpec]) -> list[str]:
    """Return the programs that wait for each other; empty if there are none."""
    left = {spec.name: {*(spec.after or ())} for spec in specs}
    while free := [name for name, after in left.items() if not after & left.keys()]:
        for name in free:
            del left[name]
    while tails := [name for name in left if not any(name in after for after in left.values())]:
        for name in tails:
            del left[name]
    return [*left]


def make_spec(values: Mapping[str, Any]) -> ProgramSpec:
    """Return a program with checked values; without ``ready`` it is ready by ``tcp`` if its command uses its port."""
    spec = ProgramSpec(**values)
    if "ready" not in values and re.search(r"\{(port|address)\}", " ".join(spec.texts)):
        spec = msgspec.structs.replace(spec, ready="tcp")
    return spec
