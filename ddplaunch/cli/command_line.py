"""Splits a command line into options of ddplaunch, the target, and the program's own arguments.

Our options come before the target. After it only a few are ours, those that say where ranks run, and only directly
after it; all else is the program's, unchanged. What could be either is refused, and the error shows both spellings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile

from ddplaunch.dataclass import dataclass, field, replace
from ddplaunch.errors import UsageError
from ddplaunch.words import edits, nearest, quoted

MARKERS = frozenset({"-m", "--module", "--no-python"})
"""They say what kind of target follows, so they always come before it; after it they are the program's."""

HELP_ALL = "--help-all"
HELP = frozenset({"-h", "--help", HELP_ALL})

DRY_RUN = "--dry-run"
JSON = "--json"

FEW = frozenset({"--nproc", "--nnodes", "--node-rank", "--master-addr", "--master-port", DRY_RUN, JSON})
"""Ours right behind a target too: people type the command again and add one. ``--json`` only in a dry run."""

ELSEWHERE = {
    "--nproc-per-node": "--nproc",  # torchrun
    "--num-processes": "--nproc",  # accelerate
    "--np": "--nproc",  # horovodrun, mpirun
    "-np": "--nproc",
    "-n": "--nproc",
    "--num-gpus": "--nproc",  # deepspeed
    "--include": "--gpus",
    "--num-nodes": "--nnodes",
    "--num-machines": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--rdzv-endpoint": "--master-addr",
    "--redirects": "--log-dir",
    "--tee": "--log-dir",
    "--devices": "--nproc",  # Lightning's fabric
    "--gpu-ids": "--gpus",  # accelerate
}
"""What other launchers call it."""

NPROC_ELSEWHERE = ("-n", "-np", "--np", "--nproc-per-node")
"""Spellings of --nproc in other launchers: refused behind the target too, where the program has no such option."""

MAX_EDITS = 2
"""Letters that differ, are missing or too many, in what is taken for a misspelt option."""

_BEHIND = "it is an option of the script: put it behind the script's name"
_NOT_OURS = {
    "--version": "ddplaunch --version shows it",
    "--quiet": "--show none hides what ranks print",
    "--verbose": "--dry-run shows the plan, and ddplaunch top what the ranks do",
    "--multi-gpu": "leave it out: there is one rank for each visible GPU, or --nproc of them",  # accelerate
    "--config-file": "accelerate's file is not read: --nproc says how many ranks, ACCELERATE_… variables the rest",
    "--mixed-precision": "it is the code's: Accelerator(mixed_precision=…), or the variable ACCELERATE_MIXED_PRECISION",
    "--use-deepspeed": "it is the code's: Accelerator(deepspeed_plugin=…)",
    "--use-fsdp": "it is the code's: Accelerator(fsdp_plugin=…)",
    "--deepspeed": _BEHIND,  # DeepSpeed
    "--deepspeed-config": _BEHIND,
    "--accelerator": "it is the code's: Fabric(accelerator=…) or Trainer(accelerator=…)",  # Lightning
    "--strategy": "it is the code's: Fabric(strategy=…) or Trainer(strategy=…)",
    "--precision": "it is the code's: Fabric(precision=…) or Trainer(precision=…)",
}
"""Options of other launchers that belong to the program or are not needed here, and what to type instead."""


_PYTHON = r"(.*/)?python(\d[\d.]*)?"


@dataclass(frozen=True)
class CommandLine:
    """Its three parts, and what people should know of them."""

    ours: tuple[str, ...]  # those behind the target last
    target: str | None
    program: tuple[str, ...]  # its own arguments
    behind: tuple[str, ...] = ()  # those of ours that were typed behind the target
    alike: tuple[str, ...] = ()  # the program's that are spelled like ours, though nothing shows that it has them


@dataclass(frozen=True)
class Translation:
    """The words to read instead of those typed, where some are torchrun's."""

    words: list[str]
    notes: tuple[str, ...] = ()  # what people should know of it
    of_torchrun: bool = False  # an option typed is torchrun's alone: so all behind the target is the program's
    unsaid: frozenset[str] = frozenset()  # ours that variables alone say: what is typed anywhere goes before them


@dataclass(frozen=True)
class Grammar:
    """What a command knows of words."""

    options: Mapping[str, bool]  # every spelling of every option of ours, and whether it takes a value
    few: Collection[str] = FEW  # the options that are ours right behind the target too
    guarded: Collection[str] = ()  # those that are refused behind it, where the target's own file does not name them
    instead: Mapping[str, str] = field(default_factory=dict)  # options that make no sense here, and what to do
    elsewhere: Mapping[str, str] = field(default_factory=lambda: ELSEWHERE)  # what others call an option of ours

    def behind(self, ours: Sequence[str], ends_at_target: bool) -> Grammar:
        """What can be meant as ours behind a target: words that say its kind never are."""
        options = {name: takes for name, takes in self.options.items() if name not in MARKERS}
        if ends_at_target or "--no-python" in ours:
            return replace(self, options=options, few=(), guarded=())
        return replace(self, options=options)

    def misspelt(self, name: str) -> str | None:
        """The option, allowed behind a target, that ``name`` is a typing error of; None where there is none."""
        dashed = hyphened(name)
        possible = sorted(set(self.few) - {JSON} - self.instead.keys())
        if name in self.options or not possible:
            return None
        if dashed in NPROC_ELSEWHERE:
            return "--nproc"
        distance, near = min((edits(dashed, option), option) for option in possible)
        return near if distance <= MAX_EDITS and dashed.startswith("--") else None

    @property
    def meant(self) -> dict[str, bool]:
        """The options behind a target that could be ours."""
        return {name: self.options[name] for name in {*self.few, *self.guarded} & self.options.keys()}


Names = Callable[[CommandLine, str], bool]
"""Whether the target's own file names an option, as far as can be seen without running it."""


def split(typed: Translation, grammar: Grammar, names: Names = lambda line, name: False) -> CommandLine:
    """Split the words typed.

    Raises:
        UsageError: an option is unknown or lacks its value, or could be ours as well as the program's.
    """
    end = end_of_ours(typed.words, grammar.options)
    ours, rest = tuple(typed.words[:end]), list(typed.words[end:])
    if rest[:1] == ["--"]:
        return CommandLine(ours, rest[1] if rest[1:] else None, tuple(rest[2:]))
    if not rest:
        return CommandLine(ours, None, ())
    if is_option(rest[0]):
        raise _unknown(rest[0], grammar)
    target = rest.pop(0)
    if rest and re.fullmatch(_PYTHON, target) and MARKERS.isdisjoint(ours):
        script = rest[next((at for at, word in enumerate(rest) if word == "-m" or not is_option(word)), 0) :]
        raise UsageError(f"{target} is not a script", f"leave out {target}: ddplaunch run … {quoted(script)}")
    # torchrun's command lines end at the target
    grammar = grammar.behind(ours, typed.of_torchrun)
    return _behind(CommandLine(ours, target, ()), rest, grammar, names, typed.unsaid)


def _behind(
    alone: CommandLine, rest: list[str], grammar: Grammar, names: Names, unsaid: Collection[str]
) -> CommandLine:
    """Split what follows the target in a line; of ``unsaid`` options another value may be typed there."""
    ours, target, options = alone.ours, alone.target, grammar.options
    misspelt = _misspelt(alone, rest, grammar, names)
    end = _end_behind(alone, rest, grammar, misspelt)
    behind, program = tuple(rest[:end]), rest[end:]
    values = values_of((*ours, *behind), options)
    for name, value in values.items():
        if options.get(name) and not value:
            raise UsageError(f"{name} has an empty value", "give it one, or leave it out")
    meant = {name: takes for name, takes in grammar.meant.items() if name != JSON or DRY_RUN in values}
    could_be = f"could be ddplaunch's or an argument of {target}"
    for name, value in values_of(behind, options).items():
        if names(alone, name):
            raise _refusal(f"{name} {could_be}", alone, rest, meant, grammar.instead, misspelt)
        if name not in unsaid and (before := values_of(ours, options).get(name, value)) != value:
            raise UsageError(f"{name} is {before} before {target} and {value} after it", "leave one of them out")
    alone = CommandLine(ours + behind, target, (), behind)
    if program[:1] == ["--"]:
        return replace(alone, program=tuple(program[1:]))
    alike = [name for name in _among(program, options) if not names(alone, name)]
    if disputed := next((name for name in alike if name in meant), None):
        raise _refusal(f"{disputed} {could_be}", alone, program, meant, grammar.instead, misspelt)
    for name, option in misspelt.items():
        what = f"{name} could be ddplaunch's {option} or an argument of {target}"
        raise _refusal(what, alone, program, meant, grammar.instead, misspelt)
    return replace(alone, program=tuple(program), alike=tuple(alike))


def _misspelt(alone: CommandLine, rest: Sequence[str], grammar: Grammar, names: Names) -> dict[str, str]:
    """The words before a ``--`` that are typing errors of options allowed behind the target, with those options."""
    found = {}
    for name in map(name_of, takewhile(lambda word: word != "--", rest)):
        option = grammar.misspelt(name) if is_option(name) else None
        if option and not names(alone, name) and not names(alone, hyphened(name)):
            found[name] = option
    return found


def _end_behind(alone: CommandLine, rest: Sequence[str], grammar: Grammar, misspelt: Mapping[str, str]) -> int:
    """Where the options of ours right behind the target end; ``--json`` is one in a dry run alone."""
    taken = {name: takes for name, takes in grammar.meant.items() if name in grammar.few}
    try:
        end = end_of_ours(rest, taken)
        if DRY_RUN in (*alone.ours, *rest[:end]):
            return end
        taken.pop(JSON, None)
        return end_of_ours(rest, taken)
    except UsageError:
        raise _refusal("", alone, rest, grammar.meant, grammar.instead, misspelt) from None


def passed_on(line: CommandLine) -> str | None:
    """The command that gives the program the ``--dry-run`` that was read as ours behind its name, if one was."""
    if DRY_RUN not in line.behind:
        return None
    looks = [word for word in line.behind if word in (DRY_RUN, JSON)]
    before = line.ours[: len(line.ours) - len(line.behind)]
    if DRY_RUN not in before:
        before = tuple(word for word in before if word != JSON)  # which means nothing without it
    ours = (*before, *(word for word in line.behind if word not in looks))
    return _spelled(CommandLine(ours, line.target, (*looks, *line.program)), FEW)


def values_of(words: Sequence[str], options: Mapping[str, bool]) -> dict[str, str]:
    """Options of ours with the values typed, "" for flags; the last one counts, as click has it."""
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        found[name] = next(rest) if options.get(name) and not equals else value
    return found


def goes_on(words: Sequence[str], options: Mapping[str, bool]) -> bool:
    """Whether options that are not ours follow those of ours that ``words`` begin with."""
    end = end_of_ours(words, options)
    return end < len(words) and is_option(words[end])


def end_of_ours(words: Sequence[str], options: Mapping[str, bool], start: int = 0) -> int:
    """Where the options of ours that begin at ``start`` end, their values included; refuse one that lacks its value."""
    while start < len(words) and (name := name_of(words[start])) in options:
        if options[name] and "=" not in words[start]:
            start += 1
            if start == len(words):
                raise UsageError(f"{name} needs a value", "ddplaunch run --help-all shows which")
            if words[start].startswith("--") or words[start] in MARKERS | HELP:
                what = f"{name} needs a value, and {words[start]} looks like an option"
                raise UsageError(what, f"{name}={words[start]}, if that is its value")
        start += 1
    return start


def name_of(word: str) -> str:
    """An option without its value."""
    return word.partition("=")[0] if word.startswith("--") else word


def is_option(word: str) -> bool:
    """Whether it looks like an option, anybody's."""
    return word.startswith("-") and word not in ("-", "--")


def _among(program: Sequence[str], options: Collection[str]) -> list[str]:
    """The options of ours among a program's arguments, as far as they go before a ``--``; also one of torchrun's."""
    names = map(name_of, takewhile(lambda word: word != "--", program))
    return list(dict.fromkeys(name for name in names if name in options or hyphened(name) == "--nproc-per-node"))


def _refusal(
    message: str,
    alone: CommandLine,
    rest: Sequence[str],
    meant: Mapping[str, bool],
    instead: Mapping[str, str],
    misspelt: Mapping[str, str],
) -> UsageError:
    """Say what is unclear with both spellings to choose from, or with one where the other would make no sense.

    ``alone`` is what is clear, ``rest`` the words behind it, ``meant`` the options in question.
    """
    doubtful = {*meant, *misspelt}
    theirs = f"the program's: {_spelled(replace(alone, program=tuple(rest)), doubtful)}"
    end = rest.index("--") if "--" in rest else len(rest)
    corrected = [misspelt.get(name_of(word), name_of(word)) + word[len(name_of(word)) :] for word in rest[:end]]
    try:
        found, left = _gather([*corrected, *rest[end:]], meant)
    except UsageError as error:
        return UsageError(message if message and misspelt else error.message, theirs)
    if senseless := next((name for name in map(name_of, found) if name in instead), None):
        return UsageError(message, f"ddplaunch's:   {instead[senseless]}\n{theirs}")
    found = tuple(name_of(word) if meant.get(name_of(word)) is False else word for word in found)  # --dry-run=1
    ours = f"ddplaunch's:   {_spelled(CommandLine(alone.ours + found, alone.target, left), doubtful)}"
    return UsageError(message, f"{ours}\n{theirs}")


def _gather(words: Sequence[str], options: Mapping[str, bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read every option of ours in ``words`` as ours; return them and what is left."""
    found, left, start = list[str](), list[str](), 0
    while start < len(words) and words[start] != "--":
        end = end_of_ours(words, options, start)
        found += words[start:end]
        if end == start:
            left.append(words[start])
        start = max(end, start + 1)
    return tuple(found), (*left, *words[start if left else start + 1 :])


def _spelled(line: CommandLine, meant: Collection[str]) -> str:
    """Write a command line that ``split`` reads as ``line``."""
    target, program = line.target or "", line.program
    words = [word for word in line.ours if word not in MARKERS] + [word for word in line.ours if word in MARKERS]
    if target.startswith("-"):
        words += ["--", target]
    elif program[:1] == ("--",) or _among(program, meant):
        words += [target, "--"]
    else:
        words.append(target)
    return quoted(["ddplaunch", "run", *words, *program])


def _unknown(word: str, grammar: Grammar) -> UsageError:
    name, options = name_of(word), grammar.options
    dashed = hyphened(name)
    if dashed not in options and dashed in _NOT_OURS:
        return UsageError(f"no such option: {name}", _NOT_OURS[dashed])
    near = dashed if dashed in options else grammar.elsewhere.get(dashed) or nearest(dashed, options)
    if near and " " in near:  # another command of ours
        return UsageError(f"{name} works only with {near}", "leave it out")
    if (name.startswith("-m") and len(name) > 2) or (options.get(name[:2]) and not name[2:].isalpha()):
        near = f"{name[:2]} {name[2:]}"
    instead = "ddplaunch run --help-all shows all options; put -- before a target that begins with a dash"
    return UsageError(f"no such option: {name}", f"did you mean {near}?" if near else instead)


def hyphened(name: str) -> str:
    """An option with dashes for the underscores that were typed."""
    return name[:2] + name[2:].replace("_", "-")
