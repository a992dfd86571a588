"""``ddplaunch rerun``: the command of an earlier run again, with other options and arguments, also at its commit."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

import click

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.redaction import HIDDEN
from ddplaunch.base.text import join_names
from ddplaunch.cli.argv_splitter import (
    DRY_RUN,
    JSON,
    TRAILING_OPTIONS,
    ArgvGrammar,
    ArgvParts,
    end_of_options,
    is_option,
    option_name,
    split_argv,
)
from ddplaunch.cli.click_commands import run_with_click
from ddplaunch.cli.lookup.batch_jobs import find_batch_job
from ddplaunch.cli.lookup.job_command import RunName
from ddplaunch.cli.lookup.remote_jobs import RemoteJob, find_remote_job
from ddplaunch.cli.lookup.run_index import find_run
from ddplaunch.cli.run_options import PARAMS
from ddplaunch.cli.target_args import make_option_lookup, translate_torchrun
from ddplaunch.cli.target_command import spellings
from ddplaunch.core.feature_registry import load_features
from ddplaunch.features.runs.history_recorder import scheduler_job_id
from ddplaunch.features.runs.provenance import SHORT_COMMIT, Provenance, read_diff, read_provenance
from ddplaunch.features.runs.rerun_check import describe_differences
from ddplaunch.features.runs.worktree import make_worktree, path_in_worktree, target_in_worktree
from ddplaunch.observe.history import history_store
from ddplaunch.system.schedulers import scheduler_registry, submitted_jobs
from ddplaunch.system.schedulers.submitted_job import SubmittedJob

_TYPED = "ddplaunch.rerun"
_OWN = {"--commit": False, "-h": False, "--help": False}


class TypedWords(NamedTuple):
    """The words of a command line of ``rerun``."""

    options: tuple[str, ...]  # before RUN, which replace those of the earlier command
    arguments: tuple[str, ...]  # after RUN, which replace arguments of the earlier command


class EarlierCommand(NamedTuple):
    """The command of an earlier run, and the provenance of that run."""

    name: str  # of the run, or the number of the job
    words: tuple[str, ...]  # after "ddplaunch"
    folder: str
    provenance: Provenance | None = None
    diff: bytes = b""
    nnodes: int = 1  # the command must be typed on each node, with its node rank


class OptionTable(NamedTuple):
    """The options of a command, by spelling."""

    takes_value: Mapping[str, bool]
    names: Mapping[str, str]  # one name for all spellings of an option

    @classmethod
    def from_params(cls, params: Sequence[click.Parameter]) -> OptionTable:
        names = {text: param.name or text for param in params for text in (*param.opts, *param.secondary_opts)}
        return cls(spellings(params), names)

    def replace_options(self, old: Sequence[str], new: Sequence[str]) -> list[str]:
        """Return the old options except those that are also among the new ones, followed by the new ones."""
        given = {self.names.get(words[0], words[0]) for words in self._split(new)}
        kept = [words for words in self._split(old) if self.names.get(words[0], words[0]) not in given]
        return [text for words in kept for text in words[1:]] + [*new]

    def remove_option(self, words: Sequence[str], name: str) -> list[str]:
        """Return the options without this one."""
        return [text for each in self._split(words) if each[0] != name for text in each[1:]]

    def _split(self, words: Sequence[str]) -> list[list[str]]:
        """Split options into one list for each: its spelling, and its words."""
        options, rest = list[list[str]](), iter(words)
        for word in rest:
            name = option_name(word)
            options.append([name, word, *([next(rest)] if self.takes_value.get(name) and "=" not in word else [])])
        return options


class _RerunCommand(click.Command):
    """Splits the line at RUN: the options before it are those of the earlier command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        known = {**spellings(PARAMS), **_OWN}
        end = end_of_options(args, known)
        if end < len(args) and is_option(args[end]):  # it may be an option of a scheduler
            known = {**known, **spellings(_submit_params(args))}
            end = end_of_options(args, known)
        options, rest = args[:end], args[end:]
        if {"-h", "--help"} & {*options}:
            return super().parse_args(ctx, ["--help"])
        if rest and is_option(rest[0]):
            hint = "options of `ddplaunch run` or `submit` come before RUN, arguments of the program after it"
            raise UsageError(f"no such option: {sanitize_line(option_name(rest[0]), 60)}", hint)
        if not rest:
            raise UsageError("the name of the run is missing", "ddplaunch ps --all lists them")
        ctx.meta[_TYPED] = TypedWords(tuple(word for word in options if word != "--commit"), tuple(rest[1:]))
        return super().parse_args(ctx, [*(["--commit"] if "--commit" in options else []), "--", rest[0]])


@click.command(cls=_RerunCommand, options_metavar="[OPTIONS]")
@click.argument("run", metavar="RUN [ARGUMENTS]...", type=RunName())
@click.option("--commit", is_flag=True, help="Run the code as it was then: the commit, and its stored changes.")
@click.pass_context
def rerun(ctx: click.Context, run: str, commit: bool) -> object:
    """Run the command of an earlier run or submitted job again.

    All OPTIONS of `ddplaunch run` (or `submit`) may stand before RUN: they replace those of the earlier command.
    ARGUMENTS after it replace those of the program with the same name, or are added. What differs from the earlier run
    (commit, changes, versions, machine) is printed first.

    With --commit the code is in a worktree of git of its own, where relative paths of outputs lead too.
    """
    typed: TypedWords = ctx.meta[_TYPED]
    earlier = find_command(run)
    worktree = make_worktree(earlier.name, earlier.provenance, earlier.diff) if commit else None
    folder = earlier.folder
    if worktree and earlier.provenance and earlier.provenance.git:
        folder = path_in_worktree(folder, earlier.provenance.git.root, worktree) or folder
    try:
        os.chdir(folder)
    except OSError as error:
        hint = "" if commit else "--commit runs it in a worktree, if its commit is recorded"
        raise UsageError(f"the folder of {earlier.name} cannot be used: {folder}: {error.strerror}", hint) from None
    words = build_command(earlier, typed, worktree)
    before, diff = earlier.provenance, earlier.diff
    differences = describe_differences(earlier.name, before, diff, folder, with_code=not commit)
    lines = [shlex.join(["ddplaunch", *words]), f"in {folder}", *differences]
    if earlier.nnodes > 1:
        lines.append(f"{earlier.name} ran on {earlier.nnodes} nodes: type the command of each on the others")
    for line in lines:
        click.echo(f"ddplaunch: {sanitize_line(line, 1000)}", err=True)
    sys.argv[1:] = words  # the record of the new run has these words
    return run_with_click(words)


def find_command(word: str) -> EarlierCommand:
    """Find the command of the run or submitted job that ``word`` names. Raises UsageError if it is not recorded."""
    if job := find_batch_job(word):
        return _command_of_job(job)
    if remote := find_remote_job(word):
        return _command_of_remote(remote)
    target_run = find_run(word)
    record = target_run.record
    if record is None:
        what = f"{target_run.run} has no record: it is starting, or runs with --no-history"
        raise UsageError(what, "ddplaunch ps shows its state")
    if record.job and scheduler_job_id(os.environ) is None:
        if (job := submitted_jobs.find_job(record.job)) is None:
            what = f"{target_run.run} ran in job {record.job}, which was not submitted by ddplaunch on this machine"
            raise UsageError(what, "submit its script again")
        return _command_of_job(job)
    provenance, diff = read_provenance(target_run.run, record.node_rank), read_diff(target_run.run, record.node_rank)
    return _check_command(EarlierCommand(target_run.run, record.argv[1:], record.cwd, provenance, diff, record.nnodes))


def _command_of_job(job: SubmittedJob) -> EarlierCommand:
    """Return the command that submitted a job, and the provenance of its first run, if the history here has it."""
    names = (name for name in reversed(history_store.list_runs()) if f"{name}.".startswith(job.run_prefix))
    run = next(names, None)
    known = (read_provenance(run), read_diff(run)) if run else (None, b"")
    return _check_command(EarlierCommand(job.number, job.argv[1:], job.typed_in, *known))


def _command_of_remote(job: RemoteJob) -> EarlierCommand:
    """Return the command that started a job on other hosts from here; their histories have its provenance."""
    if job.argv:
        return _check_command(EarlierCommand(job.run_id, job.argv[1:], job.cwd))
    what = f"{job.run_id} ran on {join_names(job.hosts)} over SSH, and its command is not recorded here"
    command = "submit --via" if job.is_submitted else "run --hosts"
    raise UsageError(what, f"type it again: ddplaunch {command} {','.join(job.hosts)} OPTIONS {job.target}")


def _check_command(command: EarlierCommand) -> EarlierCommand:
    if not command.words or not command.folder:
        raise UsageError(f"the command of {command.name} is not recorded", "type it again")
    if command.words[0] not in ("run", "submit"):
        words = sanitize_line(shlex.join(command.words), 100)
        what = f"{command.name} was not started by ddplaunch run or submit, but by: {words}"
        raise UsageError(what, "start it as you did then")
    return command


def build_command(earlier: EarlierCommand, typed: TypedWords, worktree: str | None) -> list[str]:
    """Return the words of the command to run in the current folder: the earlier command, changed by the typed words.

    Raises UsageError if the target does not exist any more, or a value is needed that was not recorded.
    """
    kind, *words = earlier.words
    params = PARAMS if kind == "run" else [*PARAMS, *_submit_params([*words, *typed.options])]
    table = OptionTable.from_params(params)
    line = _split_earlier_words(words, table, typed.options if kind == "submit" else ())
    target = _find_target(line.target or "", earlier, worktree)
    file = target.partition(":")[0]
    if file.endswith(".py") and not os.path.exists(file):
        git = earlier.provenance and earlier.provenance.git
        hint = (
            f"--commit runs it as of commit {git.commit[:SHORT_COMMIT]}"
            if git and git.commit and not worktree
            else None
        )
        raise UsageError(f"{sanitize_line(file)}, the program of {earlier.name}, is gone", hint)
    options = table.replace_options(line.options, typed.options)
    if kind == "run" and os.environ.get("DDPLAUNCH_TOKEN"):
        options = table.remove_option(options, "--token")
    arguments = replace_arguments(line.program_args, typed.arguments)
    _check_no_hidden_secret(earlier.name, options, arguments)
    if kind == "submit":
        return [kind, *options, target, *(["--"] if arguments else []), *arguments]
    return [kind, *options, *(["--"] if "--" in words or target.startswith("-") else []), target, *arguments]


def _find_target(typed: str, earlier: EarlierCommand, worktree: str | None) -> str:
    """Return the target of the earlier command, with its file in the worktree. Raises UsageError if it has none."""
    git = earlier.provenance and earlier.provenance.git
    if not typed or not worktree or not git:
        return typed
    target = target_in_worktree(typed, earlier.folder, git.root, worktree)
    if target is None:
        what = f"{sanitize_line(typed)}, the program of {earlier.name}, is not in the worktree with its commit"
        raise UsageError(what, "leave --commit out: the program runs as it is now")
    return target


def _split_earlier_words(words: Sequence[str], table: OptionTable, more: Sequence[str]) -> ArgvParts:
    """Split the words of the earlier command into options, target and arguments, as that command did."""
    rewritten = load_features().rewrite_words([*words], table.takes_value)
    translated = translate_torchrun(rewritten, table.takes_value, {})
    trailing = TRAILING_OPTIONS - {DRY_RUN, JSON} | {"--nodes", "--gpus-per-node"}
    grammar = ArgvGrammar(table.takes_value, trailing & table.takes_value.keys())
    return split_argv(translated, grammar, make_option_lookup())


def replace_arguments(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the arguments of the program: those with the name of a new one are replaced, other new ones are added."""
    given = {_name(word): word for word in new if _name(word)}
    kept, rest = list[str](), [*old]
    while rest:
        word = rest.pop(0)
        if (name := _name(word)) not in given:
            kept.append(word)
        elif word == name and rest and not is_option(rest[0]) and _has_value(name, new):
            rest.pop(0)
    return [*kept, *new]


def _name(word: str) -> str:
    """Return the name of an option or of a setting like lr=0.1; "" for another word."""
    head, equals, _ = word.partition("=")
    return head if is_option(word) or (equals and head.replace(".", "").replace("_", "").isalnum()) else ""


def _has_value(name: str, words: Sequence[str]) -> bool:
    """Whether an option has a value in a command line, in the same word or the next."""
    ends = zip(words, [*words[1:], None], strict=True)
    return any(_name(word) == name and ("=" in word or (after and not is_option(after))) for word, after in ends)


def _check_no_hidden_secret(run: str, options: Sequence[str], arguments: Sequence[str]) -> None:
    """Raise UsageError if a word has the mark of a secret that was not recorded."""
    for words, usage in ((options, "{name} VALUE {run}"), (arguments, "{run} {name} VALUE")):
        for before, word in zip(["", *words], words, strict=False):
            if HIDDEN in word:
                name = _name(word) or (before if is_option(before) else "a secret")
                what = f"the value of {name} is not recorded with {run}, as it looks like a secret"
                raise UsageError(what, f"give it again: ddplaunch rerun {usage.format(name=name, run=run)}")


def _submit_params(words: Sequence[str]) -> list[click.Parameter]:
    """Return the parameters of ``submit``, which depend on its scheduler; none if this installation lacks it."""
    command = load_features().commands().get("submit")
    if command is None:
        return []
    values = [after for word, after in zip(words, [*words[1:], ""], strict=True) if word == "--scheduler"]
    values += [word.partition("=")[2] for word in words if word.startswith("--scheduler=")]
    module = scheduler_registry.SUBMIT_COMMANDS.get(values[-1] if values else "", command.module)
    found: click.Command = import_module(module).submit
    return found.params
