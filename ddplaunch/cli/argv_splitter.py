"""Splits a command line into the options of ddplaunch, the target, and the arguments of the program.

    ddplaunch run   --gpus 0,1   train.py   --nproc 2          --lr 0.1
                    options      target     trailing options   program arguments

1. Options of ddplaunch come before the target. The target is the first word that is not an option or a value of one.
2. Directly after the target some options are still read as ddplaunch's (``TRAILING_OPTIONS``): users repeat the last
   command and append one. They end at the first other word. A torchrun command line, or one with ``--no-python``, has
   no trailing options.
3. All that follows goes to the program unchanged. ``--`` ends the options of ddplaunch: before the target it also rules
   out trailing options.
4. A word after the target that may be ddplaunch's or the program's is an error, which shows the command for each
   reading that makes sense. Such words are

   - a trailing option directly after the target, if the target's source file names it too;
   - a trailing option among the program's arguments, if that file does not name it;
   - a misspelt trailing option, if that file does not name it.
5. Other options of ddplaunch among the program's arguments go to the program, with a note (``lookalikes``).

``split_argv`` applies these rules with the ``ArgvGrammar`` of a command; it is independent of click.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile

from msgspec import Struct, field
from msgspec.structs import replace

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import closest_match, edit_distance

TARGET_KIND_OPTIONS = frozenset({"-m", "--module", "--no-python"})
"""Options for the kind of the target. They come before the target; after it they are the program's."""

HELP_ALL = "--help-all"
HELP = frozenset({"-h", "--help", HELP_ALL})

DRY_RUN = "--dry-run"
JSON = "--json"

TRAILING_OPTIONS = frozenset({"--nproc", "--nnodes", "--node-rank", "--master-addr", "--master-port", DRY_RUN, JSON})
"""Options that are ddplaunch's directly after the target too; ``--json`` only with ``--dry-run``."""

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
"""Options of other launchers, and the option of ddplaunch that an error suggests instead."""

FOREIGN_NPROC_OPTIONS = ("-n", "-np", "--np", "--nproc-per-node")
"""Spellings of --nproc in other launchers: an error after the target too, unless the program has the option."""

MAX_EDITS = 2
"""Edit distance up to which a word counts as a misspelt option."""

_SCRIPT_OPTION_HINT = "it is an option of the script: put it after the script's name"
_FOREIGN_OPTION_HINTS = {
    "--version": "ddplaunch --version shows it",
    "-q": "--show none hides the output of the ranks",
    "-v": "--dry-run shows the plan, ddplaunch top the state of the ranks",
    "--quiet": "--show none hides the output of the ranks",
    "--verbose": "--dry-run shows the plan, ddplaunch top the state of the ranks",
    "--multi-gpu": "leave it out: the default is one rank per visible GPU; --nproc sets another number",  # accelerate
    "--config-file": "accelerate's file is not read: use --nproc for the ranks, ACCELERATE_… variables for the rest",
    "--mixed-precision": "set it in the code: Accelerator(mixed_precision=…), or set ACCELERATE_MIXED_PRECISION",
    "--use-deepspeed": "set it in the code: Accelerator(deepspeed_plugin=…)",
    "--use-fsdp": "set it in the code: Accelerator(fsdp_plugin=…)",
    "--deepspeed": _SCRIPT_OPTION_HINT,  # DeepSpeed
    "--deepspeed-config": _SCRIPT_OPTION_HINT,
    "--accelerator": "set it in the code: Fabric(accelerator=…) or Trainer(accelerator=…)",  # Lightning
    "--strategy": "set it in the code: Fabric(strategy=…) or Trainer(strategy=…)",
    "--precision": "set it in the code: Fabric(precision=…) or Trainer(precision=…)",
}
"""Options of other launchers without an equivalent, and what to do instead."""


class ArgvParts(Struct, frozen=True):
    """A command line in its parts."""

    options: tuple[str, ...]  # of ddplaunch, with their values; the trailing ones last
    target: str | None
    program_args: tuple[str, ...]
    trailing_options: tuple[str, ...] = ()  # the part of ``options`` that came after the target
    lookalikes: tuple[str, ...] = ()  # program arguments that are spelled like options of ddplaunch (rule 5)


class TranslatedArgv(Struct, frozen=True):
    """The words of a command line to split: as typed, or with torchrun's options translated to ddplaunch's."""

    argv: list[str]
    notes: tuple[str, ...] = ()  # on the translation, for the user
    is_torchrun: bool = False  # whether an option in ``argv`` exists only in torchrun: no trailing options then
    env_only_options: frozenset[str] = frozenset()
    """Options in ``argv`` that come from torchrun's variables alone: a trailing option may have another value."""
    without_effect: tuple[str, ...] = ()  # torchrun's options that do nothing in ddplaunch, with their values


class ArgvGrammar(Struct, frozen=True):
    """The options that a command accepts."""

    options: Mapping[str, bool]  # every spelling of every option, and whether it takes a value
    trailing_options: Collection[str] = TRAILING_OPTIONS
    ambiguous_options: Collection[str] = ()  # more options that are an error after the target (rule 4)
    replacements: Mapping[str, str] = field(default_factory=dict)  # options that the command rejects, and hints
    foreign_names: Mapping[str, str] = field(default_factory=lambda: FOREIGN_OPTION_NAMES)

    def grammar_after_target(self, options_before: Sequence[str], *, is_torchrun: bool) -> ArgvGrammar:
        """Return the options that a command accepts in the words after the target (rule 2)."""
        options = {name: takes for name, takes in self.options.items() if name not in TARGET_KIND_OPTIONS}
        if is_torchrun or "--no-python" in options_before:
            return replace(self, options=options, trailing_options=(), ambiguous_options=())
        return replace(self, options=options)

    def find_intended_option(self, name: str) -> str | None:
        """Return the trailing option that an unknown option misspells, or None."""
        dashed = underscores_to_dashes(name)
        possible = sorted(set(self.trailing_options) - {JSON} - self.replacements.keys())
        if name in self.options or not possible:
            return None
        if dashed in FOREIGN_NPROC_OPTIONS:
            return "--nproc"
        if not dashed.startswith("--") or len(dashed) > MAX_EDITS + max(map(len, possible)):  # a text, like a key
            return None
        distance, near = min((edit_distance(dashed, option), option) for option in possible)
        return near if distance <= MAX_EDITS else None

    @property
    def trailing_candidates(self) -> dict[str, bool]:
        """The options that ddplaunch may accept, or finds ambiguous, after the target; True if it takes a value."""
        return {
            name: self.options[name] for name in {*self.trailing_options, *self.ambiguous_options} & self.options.keys()
        }


TargetHasOption = Callable[[ArgvParts, str], bool]
"""Whether the source file of the target names an option; the file is not run."""


def split_argv(
    translated: TranslatedArgv, grammar: ArgvGrammar, target_has: TargetHasOption = lambda line, name: False
) -> ArgvParts:
    """Split the words of a command line, by the rules at the top of this file.

    Raises UsageError if an option is unknown or lacks its value, or could be ddplaunch's as well as the program's.
    """
    end = end_of_options(translated.argv, grammar.options)
    options, rest = tuple(translated.argv[:end]), list(translated.argv[end:])
    if rest[:1] == ["--"]:
        _check_not_empty(option_values(options, grammar.options), grammar.options)
        return ArgvParts(options, rest[1] if rest[1:] else None, tuple(rest[2:]))
    if not rest:
        return ArgvParts(options, None, ())
    if is_option(rest[0]):
        raise _unknown_option_error(rest[0], grammar)
    target = rest.pop(0)
    grammar = grammar.grammar_after_target(options, is_torchrun=translated.is_torchrun)
    return _split_after_target(ArgvParts(options, target, ()), rest, grammar, target_has, translated.env_only_options)


def _split_after_target(
    head: ArgvParts,
    rest: list[str],
    grammar: ArgvGrammar,
    target_has: TargetHasOption,
    env_only_options: Collection[str],
) -> ArgvParts:
    """Split ``rest``, the words after the target, by rules 2 to 5.

    ``head`` is the line up to the target; ``env_only_options`` as in ``TranslatedArgv``.
    """
    target, options = head.target, grammar.options
    misspelt = _find_misspelt(head, rest, grammar, target_has)
    end = _end_of_trailing(head, rest, grammar, misspelt)
    trailing, program = tuple(rest[:end]), rest[end:]
    values = option_values((*head.options, *trailing), options)
    _check_not_empty(values, options)
    candidates = {
        name: takes for name, takes in grammar.trailing_candidates.items() if name != JSON or DRY_RUN in values
    }
    could_be = f"could be ddplaunch's or an argument of {target}"
    for name, value in option_values(trailing, options).items():
        if target_has(head, name):
            raise _ambiguity_error(f"{name} {could_be}", head, rest, candidates, grammar.replacements, misspelt)
        before = option_values(head.options, options).get(name, value)
        if before != value and name not in env_only_options:
            raise UsageError(f"{name} is {before} before {target} and {value} after it", "leave one of them out")
    head = ArgvParts(head.options + trailing, target, (), trailing)
    if program[:1] == ["--"]:
        return replace(head, program_args=tuple(program[1:]))
    lookalikes = [name for name in _find_own_options(program, options) if not target_has(head, name)]
    if ambiguous := next((name for name in lookalikes if name in candidates), None):
        raise _ambiguity_error(f"{ambiguous} {could_be}", head, program, candidates, grammar.replacements, misspelt)
    for name, option in misspelt.items():
        what = f"{name} could be ddplaunch's {option} or an argument of {target}"
        raise _ambiguity_error(what, head, program, candidates, grammar.replacements, misspelt)
    return replace(head, program_args=tuple(program), lookalikes=tuple(lookalikes))


def _find_misspelt(
    head: ArgvParts, rest: Sequence[str], grammar: ArgvGrammar, target_has: TargetHasOption
) -> dict[str, str]:
    """Find misspelt trailing options before a ``--``, and the options that they misspell."""
    misspelt = {}
    for name in map(option_name, takewhile(lambda word: word != "--", rest)):
        option = grammar.find_intended_option(name) if is_option(name) else None
        if option and not target_has(head, name) and not target_has(head, underscores_to_dashes(name)):
            misspelt[name] = option
    return misspelt


def _end_of_trailing(head: ArgvParts, rest: Sequence[str], grammar: ArgvGrammar, misspelt: Mapping[str, str]) -> int:
    """Return the index in ``rest`` where the trailing options end; ``--json`` counts only with ``--dry-run``."""
    trailing = {name: takes for name, takes in grammar.trailing_candidates.items() if name in grammar.trailing_options}
    try:
        end = end_of_options(rest, trailing)
        if DRY_RUN in (*head.options, *rest[:end]):
            return end
        trailing.pop(JSON, None)
        return end_of_options(rest, trailing)
    except UsageError:
        raise _ambiguity_error("", head, rest, grammar.trailing_candidates, grammar.replacements, misspelt) from None


def command_with_dry_run_for_program(line: ArgvParts) -> str | None:
    """Return the command that passes ``--dry-run`` to the program, if it was read as a trailing option."""
    if DRY_RUN not in line.trailing_options:
        return None
    for_program = [word for word in line.trailing_options if word in (DRY_RUN, JSON)]
    before = line.options[: len(line.options) - len(line.trailing_options)]
    if DRY_RUN not in before:
        before = tuple(word for word in before if word != JSON)  # --json has no meaning without --dry-run
    options = (*before, *(word for word in line.trailing_options if word not in for_program))
    return _join_argv(ArgvParts(options, line.target, (*for_program, *line.program_args)), TRAILING_OPTIONS)


def option_values(words: Sequence[str], options: Mapping[str, bool]) -> dict[str, str]:
    """Return the options in ``words`` with their values, "" for flags; of a repeated option the last counts."""
    values: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        values[name] = next(rest) if options.get(name) and not equals else value
    return values


def _check_not_empty(values: Mapping[str, str], options: Mapping[str, bool]) -> None:
    """Raise UsageError for an option with an empty value."""
    for name, value in values.items():
        if options.get(name) and not value:
            raise empty_value_error(name)


def empty_value_error(name: str) -> UsageError:
    """Build the error of an option with an empty value, as from a shell variable that is not set."""
    return UsageError(f"{name} has an empty value", "give it one, or leave it out")


def has_unknown_option(words: Sequence[str], options: Mapping[str, bool]) -> bool:
    """Whether there is an option before the target that is not in ``options``."""
    end = end_of_options(words, options)
    return end < len(words) and is_option(words[end])


def end_of_options(words: Sequence[str], options: Mapping[str, bool], start: int = 0) -> int:
    """Return the index after the options that begin at ``start``. Raises UsageError if a value is missing."""
    while start < len(words) and (name := option_name(words[start])) in options:
        if options[name] and "=" not in words[start]:
            start += 1
            if start == len(words):
                raise UsageError(f"{name} needs a value", "ddplaunch run --help-all shows which")
            is_one_word = len(words[start].split()) < 2  # else it is a value that has an option in it, as of --grid
            if (words[start].startswith("--") and is_one_word) or words[start] in TARGET_KIND_OPTIONS | HELP:
                what = f"{name} needs a value, and {words[start]} looks like an option"
                raise UsageError(what, f"if that is its value: {name}={words[start]}")
        start += 1
    return start


def option_name(word: str) -> str:
    """Strip the value from ``--name=value``."""
    return word.partition("=")[0] if word.startswith("--") else word


def is_option(word: str) -> bool:
    """Whether a word looks like an option of any program."""
    return word.startswith("-") and word not in ("-", "--")


def _find_own_options(program_args: Sequence[str], options: Collection[str]) -> list[str]:
    """Find options of ddplaunch, and torchrun's --nproc-per-node, among the program's arguments before a ``--``."""
    names = map(option_name, takewhile(lambda word: word != "--", program_args))
    return list(
        dict.fromkeys(name for name in names if name in options or underscores_to_dashes(name) == "--nproc-per-node")
    )


def _ambiguity_error(
    message: str,
    head: ArgvParts,
    rest: Sequence[str],
    candidates: Mapping[str, bool],
    replacements: Mapping[str, str],
    misspelt: Mapping[str, str],
) -> UsageError:
    """Build the error for ambiguous options after the target (rule 4), with the command to type for each meaning.

    Args:
        message: what is ambiguous; "" if the words cannot be split because a value is missing, which is shown instead.
        head: the part of the line that is not ambiguous.
        rest: the words after ``head``.
        candidates: the options that may be ddplaunch's, and whether they take a value.
        replacements: as in ``ArgvGrammar``.
        misspelt: words that misspell a trailing option, and that option.
    """
    ambiguous = {*candidates, *misspelt}
    for_program = f"the program's: {_join_argv(replace(head, program_args=tuple(rest)), ambiguous)}"
    end = rest.index("--") if "--" in rest else len(rest)
    corrected = [
        misspelt.get(option_name(word), option_name(word)) + word[len(option_name(word)) :] for word in rest[:end]
    ]
    try:
        extracted, left = _extract_options([*corrected, *rest[end:]], candidates)
    except UsageError as error:
        return UsageError(message if message and misspelt else error.message, for_program)
    if rejected := next((name for name in map(option_name, extracted) if name in replacements), None):
        return UsageError(message, f"ddplaunch's:   {replacements[rejected]}\n{for_program}")
    flags = {name for name, takes in candidates.items() if not takes}
    extracted = tuple(option_name(word) if option_name(word) in flags else word for word in extracted)  # --dry-run=1
    for_ddplaunch = f"ddplaunch's:   {_join_argv(ArgvParts(head.options + extracted, head.target, left), ambiguous)}"
    return UsageError(message, f"{for_ddplaunch}\n{for_program}")


def _extract_options(words: Sequence[str], options: Mapping[str, bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Take all of ``options`` out of ``words``, up to a ``--``; return them and the words that are left."""
    extracted, left, start = list[str](), list[str](), 0
    while start < len(words) and words[start] != "--":
        end = end_of_options(words, options, start)
        extracted += words[start:end]
        if end == start:
            left.append(words[start])
        start = max(end, start + 1)
    return tuple(extracted), (*left, *words[start if left else start + 1 :])


def _join_argv(line: ArgvParts, ambiguous: Collection[str]) -> str:
    """Return a command that ``split_argv`` reads as ``line``; ``--`` goes before arguments with ambiguous options."""
    target, program = line.target or "", line.program_args
    words = [word for word in line.options if word not in TARGET_KIND_OPTIONS] + [
        word for word in line.options if word in TARGET_KIND_OPTIONS
    ]
    if target.startswith("-"):
        words += ["--", target]
    elif program[:1] == ("--",) or _find_own_options(program, ambiguous):
        words += [target, "--"]
    else:
        words.append(target)
    return shlex.join(["ddplaunch", "run", *words, *program])


def _unknown_option_error(word: str, grammar: ArgvGrammar) -> UsageError:
    """Build the error of an unknown option before the target, with what may have been intended."""
    name, options = option_name(word), grammar.options
    dashed = underscores_to_dashes(name)
    if dashed in _FOREIGN_OPTION_HINTS and not (dashed in options or dashed in grammar.foreign_names):
        return UsageError(f"no such option: {name}", _FOREIGN_OPTION_HINTS[dashed])
    near = dashed if dashed in options else grammar.foreign_names.get(dashed) or closest_match(dashed, options)
    if near and " " in near:  # a command: the option is another command's
        return UsageError(f"{name} works only with {near}", "leave it out")
    if (name.startswith("-m") and len(name) > 2) or (options.get(name[:2]) and not name[2:].isalpha()):
        near = f"{name[:2]} {name[2:]}"
    hint = "ddplaunch run --help-all lists all options; put -- before a target that begins with a dash"
    return UsageError(f"no such option: {name}", f"did you mean {near}?" if near else hint)


def underscores_to_dashes(name: str) -> str:
    """Replace the underscores in an option's name by dashes."""
    return name[:2] + name[2:].replace("_", "-")
