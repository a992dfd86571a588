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
from ddplaunch.words import closest_match, edits, shell_quote

TARGET_KIND_OPTIONS = frozenset({"-m", "--module", "--no-python"})
"""They say what kind of target follows, so they always come before it; after it they are the program's."""

HELP_ALL = "--help-all"
HELP = frozenset({"-h", "--help", HELP_ALL})

DRY_RUN = "--dry-run"
JSON = "--json"

TRAILING_OPTIONS = frozenset({"--nproc", "--nnodes", "--node-rank", "--master-addr", "--master-port", DRY_RUN, JSON})
"""Ours right behind a target too: people type the command again and add one. ``--json`` only in a dry run."""

FOREIGN_OPTION_NAMES = {
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

_SCRIPT_OPTION_HINT = "it is an option of the script: put it behind the script's name"
_FOREIGN_OPTIONS = {
    "--version": "ddplaunch --version shows it",
    "--quiet": "--show none hides what ranks print",
    "--verbose": "--dry-run shows the plan, and ddplaunch top what the ranks do",
    "--multi-gpu": "leave it out: there is one rank for each visible GPU, or --nproc of them",  # accelerate
    "--config-file": "accelerate's file is not read: --nproc says how many ranks, ACCELERATE_… variables the rest",
    "--mixed-precision": "it is the code's: Accelerator(mixed_precision=…), or the variable ACCELERATE_MIXED_PRECISION",
    "--use-deepspeed": "it is the code's: Accelerator(deepspeed_plugin=…)",
    "--use-fsdp": "it is the code's: Accelerator(fsdp_plugin=…)",
    "--deepspeed": _SCRIPT_OPTION_HINT,  # DeepSpeed
    "--deepspeed-config": _SCRIPT_OPTION_HINT,
    "--accelerator": "it is the code's: Fabric(accelerator=…) or Trainer(accelerator=…)",  # Lightning
    "--strategy": "it is the code's: Fabric(strategy=…) or Trainer(strategy=…)",
    "--precision": "it is the code's: Fabric(precision=…) or Trainer(precision=…)",
}
"""Options of other launchers that belong to the program or are not needed here, and what to type instead."""


_PYTHON_PATTERN = r"(.*/)?python(\d[\d.]*)?"


@dataclass(frozen=True)
class SplitArgv:
    """Its three parts, and what people should know of them."""

    options: tuple[str, ...]  # those behind the target last
    target: str | None
    program_args: tuple[str, ...]  # its own arguments
    trailing_options: tuple[str, ...] = ()  # those of ours that were typed behind the target
    lookalikes: tuple[str, ...] = ()  # the program's that are spelled like ours, though nothing shows that it has them


@dataclass(frozen=True)
class TranslatedArgv:
    """The words to read instead of those typed, where some are torchrun's."""

    argv: list[str]
    notes: tuple[str, ...] = ()  # what people should know of it
    is_torchrun: bool = False  # an option typed is torchrun's alone: so all behind the target is the program's
    env_only_options: frozenset[str] = (
        frozenset()
    )  # ours that variables alone say: what is typed anywhere goes before them


@dataclass(frozen=True)
class ArgvGrammar:
    """What a command knows of words."""

    options: Mapping[str, bool]  # every spelling of every option of ours, and whether it takes a value
    trailing_options: Collection[str] = TRAILING_OPTIONS  # the options that are ours right behind the target too
    ambiguous_options: Collection[
        str
    ] = ()  # those that are refused behind it, where the target's own file does not name them
    replacements: Mapping[str, str] = field(default_factory=dict)  # options that make no sense here, and what to do
    foreign_names: Mapping[str, str] = field(
        default_factory=lambda: FOREIGN_OPTION_NAMES
    )  # what others call an option of ours

    def after_target(self, ours: Sequence[str], ends_at_target: bool) -> ArgvGrammar:
        """What can be meant as ours behind a target: words that say its kind never are."""
        options = {name: takes for name, takes in self.options.items() if name not in TARGET_KIND_OPTIONS}
        if ends_at_target or "--no-python" in ours:
            return replace(self, options=options, trailing_options=(), ambiguous_options=())
        return replace(self, options=options)

    def misspelt(self, name: str) -> str | None:
        """The option, allowed behind a target, that ``name`` is a typing error of; None where there is none."""
        dashed = with_dashes(name)
        possible = sorted(set(self.trailing_options) - {JSON} - self.replacements.keys())
        if name in self.options or not possible:
            return None
        if dashed in NPROC_ELSEWHERE:
            return "--nproc"
        distance, near = min((edits(dashed, option), option) for option in possible)
        return near if distance <= MAX_EDITS and dashed.startswith("--") else None

    @property
    def trailing_candidates(self) -> dict[str, bool]:
        """The options behind a target that could be ours."""
        return {
            name: self.options[name] for name in {*self.trailing_options, *self.ambiguous_options} & self.options.keys()
        }


NamesOption = Callable[[SplitArgv, str], bool]
"""Whether the target's own file names an option, as far as can be seen without running it."""


def split_argv(typed: TranslatedArgv, grammar: ArgvGrammar, names: NamesOption = lambda line, name: False) -> SplitArgv:
    """Split the words typed.

    Raises:
        UsageError: an option is unknown or lacks its value, or could be ours as well as the program's.
    """
    end = end_of_options(typed.argv, grammar.options)
    ours, rest = tuple(typed.argv[:end]), list(typed.argv[end:])
    if rest[:1] == ["--"]:
        return SplitArgv(ours, rest[1] if rest[1:] else None, tuple(rest[2:]))
    if not rest:
        return SplitArgv(ours, None, ())
    if is_option(rest[0]):
        raise _unknown_option_error(rest[0], grammar)
    target = rest.pop(0)
    if rest and re.fullmatch(_PYTHON_PATTERN, target) and TARGET_KIND_OPTIONS.isdisjoint(ours):
        script = rest[next((at for at, word in enumerate(rest) if word == "-m" or not is_option(word)), 0) :]
        raise UsageError(f"{target} is not a script", f"leave out {target}: ddplaunch run … {shell_quote(script)}")
    # torchrun's command lines end at the target
    grammar = grammar.after_target(ours, typed.is_torchrun)
    return _split_trailing(SplitArgv(ours, target, ()), rest, grammar, names, typed.env_only_options)


def _split_trailing(
    alone: SplitArgv, rest: list[str], grammar: ArgvGrammar, names: NamesOption, unsaid: Collection[str]
) -> SplitArgv:
    """Split what follows the target in a line; of ``env_only_options`` options another value may be typed there."""
    ours, target, options = alone.options, alone.target, grammar.options
    misspelt = _misspelt(alone, rest, grammar, names)
    end = _end_of_trailing(alone, rest, grammar, misspelt)
    behind, program = tuple(rest[:end]), rest[end:]
    values = option_values((*ours, *behind), options)
    for name, value in values.items():
        if options.get(name) and not value:
            raise UsageError(f"{name} has an empty value", "give it one, or leave it out")
    meant = {name: takes for name, takes in grammar.trailing_candidates.items() if name != JSON or DRY_RUN in values}
    could_be = f"could be ddplaunch's or an argument of {target}"
    for name, value in option_values(behind, options).items():
        if names(alone, name):
            raise _ambiguity_error(f"{name} {could_be}", alone, rest, meant, grammar.replacements, misspelt)
        if name not in unsaid and (before := option_values(ours, options).get(name, value)) != value:
            raise UsageError(f"{name} is {before} before {target} and {value} after it", "leave one of them out")
    alone = SplitArgv(ours + behind, target, (), behind)
    if program[:1] == ["--"]:
        return replace(alone, program_args=tuple(program[1:]))
    alike = [name for name in _own_options_in(program, options) if not names(alone, name)]
    if disputed := next((name for name in alike if name in meant), None):
        raise _ambiguity_error(f"{disputed} {could_be}", alone, program, meant, grammar.replacements, misspelt)
    for name, option in misspelt.items():
        what = f"{name} could be ddplaunch's {option} or an argument of {target}"
        raise _ambiguity_error(what, alone, program, meant, grammar.replacements, misspelt)
    return replace(alone, program_args=tuple(program), lookalikes=tuple(alike))


def _misspelt(alone: SplitArgv, rest: Sequence[str], grammar: ArgvGrammar, names: NamesOption) -> dict[str, str]:
    """The words before a ``--`` that are typing errors of options allowed behind the target, with those options."""
    found = {}
    for name in map(option_name, takewhile(lambda word: word != "--", rest)):
        option = grammar.misspelt(name) if is_option(name) else None
        if option and not names(alone, name) and not names(alone, with_dashes(name)):
            found[name] = option
    return found


def _end_of_trailing(alone: SplitArgv, rest: Sequence[str], grammar: ArgvGrammar, misspelt: Mapping[str, str]) -> int:
    """Where the options of ours right behind the target end; ``--json`` is one in a dry run alone."""
    taken = {name: takes for name, takes in grammar.trailing_candidates.items() if name in grammar.trailing_options}
    try:
        end = end_of_options(rest, taken)
        if DRY_RUN in (*alone.options, *rest[:end]):
            return end
        taken.pop(JSON, None)
        return end_of_options(rest, taken)
    except UsageError:
        raise _ambiguity_error("", alone, rest, grammar.trailing_candidates, grammar.replacements, misspelt) from None


def command_with_dry_run_for_program(line: SplitArgv) -> str | None:
    """The command that gives the program the ``--dry-run`` that was read as ours behind its name, if one was."""
    if DRY_RUN not in line.trailing_options:
        return None
    looks = [word for word in line.trailing_options if word in (DRY_RUN, JSON)]
    before = line.options[: len(line.options) - len(line.trailing_options)]
    if DRY_RUN not in before:
        before = tuple(word for word in before if word != JSON)  # which means nothing without it
    ours = (*before, *(word for word in line.trailing_options if word not in looks))
    return _join_argv(SplitArgv(ours, line.target, (*looks, *line.program_args)), TRAILING_OPTIONS)


def option_values(words: Sequence[str], options: Mapping[str, bool]) -> dict[str, str]:
    """Options of ours with the values typed, "" for flags; the last one counts, as click has it."""
    found: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        found[name] = next(rest) if options.get(name) and not equals else value
    return found


def has_unknown_option(words: Sequence[str], options: Mapping[str, bool]) -> bool:
    """Whether options that are not ours follow those of ours that ``argv`` begin with."""
    end = end_of_options(words, options)
    return end < len(words) and is_option(words[end])


def end_of_options(words: Sequence[str], options: Mapping[str, bool], start: int = 0) -> int:
    """Where the options of ours that begin at ``start`` end, their values included; refuse one that lacks its value."""
    while start < len(words) and (name := option_name(words[start])) in options:
        if options[name] and "=" not in words[start]:
            start += 1
            if start == len(words):
                raise UsageError(f"{name} needs a value", "ddplaunch run --help-all shows which")
            if words[start].startswith("--") or words[start] in TARGET_KIND_OPTIONS | HELP:
                what = f"{name} needs a value, and {words[start]} looks like an option"
                raise UsageError(what, f"{name}={words[start]}, if that is its value")
        start += 1
    return start


def option_name(word: str) -> str:
    """An option without its value."""
    return word.partition("=")[0] if word.startswith("--") else word


def is_option(word: str) -> bool:
    """Whether it looks like an option, anybody's."""
    return word.startswith("-") and word not in ("-", "--")


def _own_options_in(program: Sequence[str], options: Collection[str]) -> list[str]:
    """The options of ours among a program's arguments, as far as they go before a ``--``; also one of torchrun's."""
    names = map(option_name, takewhile(lambda word: word != "--", program))
    return list(dict.fromkeys(name for name in names if name in options or with_dashes(name) == "--nproc-per-node"))


def _ambiguity_error(
    message: str,
    alone: SplitArgv,
    rest: Sequence[str],
    meant: Mapping[str, bool],
    instead: Mapping[str, str],
    misspelt: Mapping[str, str],
) -> UsageError:
    """Say what is unclear with both spellings to choose from, or with one where the other would make no sense.

    ``alone`` is what is clear, ``rest`` the words behind it, ``trailing_candidates`` the options in question.
    """
    doubtful = {*meant, *misspelt}
    theirs = f"the program's: {_join_argv(replace(alone, program_args=tuple(rest)), doubtful)}"
    end = rest.index("--") if "--" in rest else len(rest)
    corrected = [
        misspelt.get(option_name(word), option_name(word)) + word[len(option_name(word)) :] for word in rest[:end]
    ]
    try:
        found, left = _extract_options([*corrected, *rest[end:]], meant)
    except UsageError as error:
        return UsageError(message if message and misspelt else error.message, theirs)
    if senseless := next((name for name in map(option_name, found) if name in instead), None):
        return UsageError(message, f"ddplaunch's:   {instead[senseless]}\n{theirs}")
    found = tuple(option_name(word) if meant.get(option_name(word)) is False else word for word in found)  # --dry-run=1
    ours = f"ddplaunch's:   {_join_argv(SplitArgv(alone.options + found, alone.target, left), doubtful)}"
    return UsageError(message, f"{ours}\n{theirs}")


def _extract_options(words: Sequence[str], options: Mapping[str, bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read every option of ours in ``argv`` as ours; return them and what is left."""
    found, left, start = list[str](), list[str](), 0
    while start < len(words) and words[start] != "--":
        end = end_of_options(words, options, start)
        found += words[start:end]
        if end == start:
            left.append(words[start])
        start = max(end, start + 1)
    return tuple(found), (*left, *words[start if left else start + 1 :])


def _join_argv(line: SplitArgv, meant: Collection[str]) -> str:
    """Write a command line that ``split_argv`` reads as ``line``."""
    target, program = line.target or "", line.program_args
    words = [word for word in line.options if word not in TARGET_KIND_OPTIONS] + [
        word for word in line.options if word in TARGET_KIND_OPTIONS
    ]
    if target.startswith("-"):
        words += ["--", target]
    elif program[:1] == ("--",) or _own_options_in(program, meant):
        words += [target, "--"]
    else:
        words.append(target)
    return shell_quote(["ddplaunch", "run", *words, *program])


def _unknown_option_error(word: str, grammar: ArgvGrammar) -> UsageError:
    name, options = option_name(word), grammar.options
    dashed = with_dashes(name)
    if dashed not in options and dashed in _FOREIGN_OPTIONS:
        return UsageError(f"no such option: {name}", _FOREIGN_OPTIONS[dashed])
    near = dashed if dashed in options else grammar.foreign_names.get(dashed) or closest_match(dashed, options)
    if near and " " in near:  # another command of ours
        return UsageError(f"{name} works only with {near}", "leave it out")
    if (name.startswith("-m") and len(name) > 2) or (options.get(name[:2]) and not name[2:].isalpha()):
        near = f"{name[:2]} {name[2:]}"
    instead = "ddplaunch run --help-all shows all options; put -- before a target that begins with a dash"
    return UsageError(f"no such option: {name}", f"did you mean {near}?" if near else instead)


def with_dashes(name: str) -> str:
    """An option with dashes for the underscores that were typed."""
    return name[:2] + name[2:].replace("_", "-")
