"""``ddplaunch submit``: from what was typed and written down as defaults to a batch script, and from that to a job.

For Kubernetes it ends with the manifest, which is printed.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from ddplaunch.cli.command_line import DRY_RUN, ELSEWHERE, FEW, HELP, JSON, CommandLine, split
from ddplaunch.cli.run import run
from ddplaunch.cli.submit_options import (
    INSTEAD,
    NAMES,
    OF_SBATCH,
    OF_TORCHRUN,
    REFUSED,
    REPLACED,
    SECTIONS,
    SYSTEMS,
    options,
    seconds,
)
from ddplaunch.cli.surroundings import check_token
from ddplaunch.cli.target_command import (
    SETTINGS,
    TargetCommand,
    current_directory,
    find_target,
    program_names,
    remarks,
    spellings,
)
from ddplaunch.errors import EXIT_SIGNAL, UsageError

if TYPE_CHECKING:
    from ddplaunch.submit.queue import JobId
    from ddplaunch.submit.slurm import Request, Requeue, Setup


class _SubmitCommand(TargetCommand):
    """Takes the options of ``run`` as ``run`` does, wherever its own stand.

    A value that neither a flag nor a file gives is the scheduler's to choose. What is typed must be for this scheduler;
    what a file says for another is not heard. Nothing that could have been meant for us is handed to the program by
    guess: what is submitted is paid for.
    """

    sections = SECTIONS
    starts_here = False
    refused = OF_TORCHRUN
    skipped = OF_SBATCH.keys()
    few = FEW - {DRY_RUN, JSON} | {"--nodes", "--gpus-per-node"}

    def spellings(self, ctx: click.Context) -> dict[str, bool]:
        return {**spellings(run.params), **super().spellings(ctx)}

    def split(self, ctx: click.Context, words: list[str], **how: Any) -> CommandLine:
        own = self.spellings(ctx)
        try:
            placed = split(
                words,
                own,
                program_names(),
                few=self.few,
                guarded=own.keys() - HELP,
                instead={name: hint.format(system="the scheduler") for name, hint in INSTEAD.items()},
                elsewhere={**ELSEWHERE, **OF_SBATCH},
                **how,
            )
        except UsageError as error:
            raise _of_submit(error) from None
        self._read_defaults(ctx, placed)
        scheduler = _scheduler(ctx, placed)
        refused = REFUSED[scheduler]
        for word in placed.ours:
            if (name := word.partition("=")[0]) in refused:
                raise UsageError(f"{name} is not for a job of {SYSTEMS[scheduler]}", refused[name])
        if ctx.default_map:
            spelled = {param.name: param.opts[-1] for param in self.params}
            unheard = {name: spelled[name] for name in ctx.default_map if spelled[name] in refused}
            ctx.default_map = {name: value for name, value in ctx.default_map.items() if name not in unheard}
            ctx.meta["unheard"] = unheard
        ctx.meta["placed"] = placed
        return placed

    def _read_defaults(self, ctx: click.Context, placed: CommandLine) -> None:
        from ddplaunch.cli.defaults import read

        options = [param for param in self.params if isinstance(param, click.Option) and param.opts[-1] in NAMES]
        own = [option for option in options if option.opts[-1] != "--config"]
        defaults, ctx.meta["unread"] = read(
            "submit", own, current_directory(), os.environ, _value_of("--config", placed)
        )
        ctx.meta["defaults"] = defaults
        ctx.default_map = {name: default.value for name, default in defaults.items()}


def _of_submit(error: UsageError) -> UsageError:
    """Hints of what we share with ``run`` name that command."""
    hint = error.hint and re.sub(r"(?m)^(.*?)ddplaunch run\b", r"\1ddplaunch submit", error.hint)  # once a line
    return UsageError(error.message, hint)


def _scheduler(ctx: click.Context, placed: CommandLine) -> str:
    """Which one it is, before click has read the words; what is none is for click to refuse."""
    found = _value_of("--scheduler", placed) or str((ctx.default_map or {}).get("scheduler", "slurm"))
    return found if found in SYSTEMS else "slurm"


def _value_of(option: str, placed: CommandLine) -> str | None:
    """The value of an option that is needed before click has read the words; the last one counts, as for click."""
    found = None
    for index, word in enumerate(placed.ours):
        name, equals, value = word.partition("=")
        if name == option:
            found = value if equals else placed.ours[index + 1]
    return found


_OF_RUN = [param for param in run.params if param.opts[-1] not in {"--dry-run", *REPLACED, *INSTEAD}]


@click.command(cls=_SubmitCommand, options_metavar="[OPTIONS]", context_settings=SETTINGS, params=_OF_RUN)
@options
@click.option("--dry-run", is_flag=True, help="Print the script, and where each value comes from; submit nothing.")
def submit(target: str, args: tuple[str, ...], **flags: Any) -> int:
    """Submit a training job to Slurm, or write one for Kubernetes.

    Writes a batch script that starts `ddplaunch run` once on each node, and hands it to sbatch; or a manifest whose
    pods do, for kubectl. TARGET, its ARGS and the options from "Target" on are those of `ddplaunch run`.

    Defaults stand in [tool.ddplaunch.submit] of pyproject.toml and [submit] of ~/.config/ddplaunch.toml.
    """
    if flags["scheduler"] == "kubernetes":
        return _print_manifest(target, flags)
    from ddplaunch.submit import queue, slurm

    if flags["array"] and flags["follow"]:
        raise UsageError(
            f"--follow shows one log, and --array {flags['array']} makes a job for each index",
            "--no-follow submits it",
        )
    if flags["container_image"] is None:  # else the target may well be in the image only
        try:
            about = ("module", "no_python", "pass_local_rank", "start", "preload")
            find_target(target, args, **{name: flags[name] for name in about})
        except UsageError as error:
            raise _of_submit(error) from None
        if flags["tensorboard"] is not None:
            from ddplaunch.cli.sidecars import check_tensorboard

            check_tensorboard(flags["tensorboard"])
    check_token(None)
    request = _request(target, args, flags)
    script = slurm.script(request)
    if flags["dry_run"]:
        click.echo(os.fsencode(script), nl=False)  # as sbatch would get it: of text, click drops escape sequences
        _explain(_sources_in_slurm(request), _notes(flags))
        return 0
    for note in (*_notes(flags), *_from_files(vars(request))):
        _say(note)
    queue.check_is_here(os.environ)
    if flags["container_image"] and not queue.has_containers():
        _say("srun has no --container-image here: if the nodes have no pyxis either, the job will fail")
    _prepare_log(request)
    job = queue.submit(script, os.environ)
    log = slurm.log_path(request, job.number)
    lines = [f"job {job.number}: {target} on {request.nodes} node{'s' * (request.nodes > 1)}", f"log: {log}"]
    cancel = f"cancel: scancel {' '.join(job.words)}"
    if not flags["follow"]:
        import shlex

        follow = [] if request.array else [f"follow: tail -n +1 -F {shlex.quote(log)}"]
        click.echo(os.fsencode("\n".join([*lines, *follow, cancel])))
        return 0
    for line in (*lines, cancel):
        _say(line)
    return _follow(job, log)


def _print_manifest(target: str, flags: dict[str, Any]) -> int:
    """Print the job for Kubernetes; on stderr only what does not come from the words typed, all of it in a dry run."""
    from ddplaunch.cli import in_kubernetes
    from ddplaunch.submit import kubernetes

    words = _words_of_run(click.get_current_context().meta["placed"])
    request = in_kubernetes.request(target, words, flags)
    click.echo(kubernetes.manifest(request).encode(), nl=False)  # kubectl reads UTF-8, whatever the terminal does
    if flags["dry_run"]:
        ours = {"scheduler": "default", "job-name": "the target", "nodes": "default"}
        _explain(_sources({**flags, "job_name": request.name}, ours), _unheard())
        return 0
    for note in (*_unheard(), *_from_files(flags)):
        _say(note)
    return 0


# ------------------------------------------------------------------------------------------------- what is asked for


def _request(target: str, args: tuple[str, ...], flags: dict[str, Any]) -> Request:
    from ddplaunch.submit.slurm import Request

    named = {name: flags[name] for name in Request.__dataclass_fields__ if name in flags}
    context = click.get_current_context()
    named |= {
        "job_name": flags["job_name"] or os.path.basename(target),
        "output": flags["output"] or ("slurm-%A_%a.out" if flags["array"] else "slurm-%j.out"),
        "setup": tuple(_setups(flags["setup"])),
        "requeue": _requeue(flags),
    }
    return Request(
        command=_words_of_run(context.meta["placed"]),
        interpreter="python" if flags["container_image"] else sys.executable,
        chdir=current_directory(),
        **named,
    )


def _requeue(flags: dict[str, Any]) -> Requeue | None:
    """What --requeue means in seconds and signals."""
    from ddplaunch.submit.slurm import Requeue

    if not flags["requeue"]:
        return None
    warning = flags["preempt_signal"]
    if warning is None or warning in (signal.SIGTERM, signal.SIGHUP):
        name = "none" if warning is None else signal.Signals(warning).name.removeprefix("SIG")
        raise UsageError(
            f"--requeue {flags['requeue']} needs a warning of its own, and --preempt-signal is {name}",
            "leave --preempt-signal out: scancel sends SIGTERM too, and a cancelled job must not come back",
        )
    for words in flags["sbatch_args"]:
        if words.startswith(("--signal", "--no-requeue")):
            raise UsageError(
                f"--sbatch-arg {words}: --requeue {flags['requeue']} says that itself",
                "--preempt-grace says how long before the end the warning comes",
            )
    name = signal.Signals(warning).name.removeprefix("SIG")
    requeue = Requeue(flags["requeue"], name, flags["preempt_grace"], flags["grace"])
    limit = seconds(flags["time"] or "UNLIMITED")
    if limit is not None and limit <= requeue.before_the_end:
        raise UsageError(
            f"--time {flags['time']} is {limit} s, and the warning comes {requeue.before_the_end} s before its end"
            f" (--preempt-grace {requeue.grace:g} and --grace {requeue.stopping:g})",
            "give it more time, or shorten --preempt-grace",
        )
    return requeue


def _words_of_run(placed: CommandLine) -> tuple[str, ...]:
    """The words behind ``ddplaunch run`` on the nodes: as typed, without what is for the scheduler."""
    takes = spellings(click.get_current_context().command.params)
    words: list[str] = []
    typed = iter(placed.ours)
    for word in typed:
        name, equals, _ = word.partition("=")
        value = [next(typed)] if takes[name] and not equals else []
        if name not in NAMES | {"--dry-run"}:
            words += [word, *value]
    assert placed.target is not None
    if placed.target.startswith("-"):
        return (*words, "--", placed.target, *placed.program)
    return (*words, placed.target, *(("--", *placed.program) if placed.program else ()))


def _setups(texts: tuple[str, ...]) -> Iterator[Setup]:
    """Tell files from commands. What stands in a file is looked for beside that file."""
    from ddplaunch.submit.slurm import Setup

    context = click.get_current_context()
    source = context.get_parameter_source("setup")
    from_file = source is not None and source.name == "DEFAULT_MAP"
    folder = os.path.dirname(context.meta["defaults"]["setup"].file) if from_file else current_directory()
    for text in texts:
        path = os.path.join(folder, os.path.expanduser(text))
        if os.path.isfile(path):
            yield Setup(path, is_file=True)
        elif len(text.split()) == 1 and (text.endswith(".sh") or "/" in text):
            raise UsageError(
                f"--setup {text}: there is no such file in {folder}", "a command is written with its words"
            )
        elif text.strip():
            yield Setup(text)


def _prepare_log(request: Request) -> None:
    """Make the log's folder, which Slurm does not, and try to write there: else a job fails without a word."""
    path = os.path.join(request.chdir, request.output)
    where = folder = os.path.dirname(path)
    if "%" in folder:
        return
    probe = os.path.join(folder, f".ddplaunch-{os.getpid()}")
    try:
        if os.path.exists(path):
            where = path
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))
        else:
            os.makedirs(folder, exist_ok=True)
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            os.unlink(probe)
    except OSError as error:
        message = f"the log cannot be written: {where}: {error.strerror}"
        raise UsageError(message, "--output DIR/slurm-%j.out names another folder") from None


def _explain(sources: Iterator[str], notes: Iterator[str]) -> None:
    for line in (*sources, *(f"note: {note}" for note in notes)):
        click.echo(line, err=True)


def _sources_in_slurm(request: Request) -> Iterator[str]:
    """Each value of the script with the place it comes from."""
    from ddplaunch.submit.queue import OVERRIDES

    yield from _sources(vars(request), {"job-name": "the target", "output": "default", "nodes": "default"}, OVERRIDES)
    yield f"chdir: {request.chdir} (the current directory)"
    yield f"interpreter: {request.interpreter} ({'of the image' if request.container_image else 'this one'})"


def _sources(values: Mapping[str, Any], ours: Mapping[str, str], overrides: Mapping[str, str] = {}) -> Iterator[str]:
    """Each value with the place it comes from, ``ours`` if nobody gave it; ``overrides`` are variables of sbatch."""
    context = click.get_current_context()
    for param in context.command.params:
        option = param.opts[-1].removeprefix("--")
        source = context.get_parameter_source(param.name or "")
        if param.opts[-1] not in NAMES - {"--follow"} or source is None or param.name not in values:
            continue
        value = values[param.name]
        if source.name == "DEFAULT_MAP":
            yield f"{option}: {_shown(value)} ({context.meta['defaults'][param.name].file})"
        elif source.name == "COMMANDLINE":
            yield f"{option}: {_shown(value)} ({param.opts[-1]})"
        elif option in ours:
            yield f"{option}: {_shown(value)} ({ours[option]})"
        elif variable := os.environ.get(overrides.get(option, "")):
            yield f"{option}: {variable} ({overrides[option]}, which sbatch reads)"


def _from_files(values: Mapping[str, Any]) -> Iterator[str]:
    """What files have decided: who submits has not typed it, and may not have written it either."""
    context = click.get_current_context()
    for name, default in context.meta["defaults"].items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "DEFAULT_MAP" and name in values:
            option = next(param.opts[-1] for param in context.command.params if param.name == name)
            yield f"{option.removeprefix('--')}: {_shown(values[name])} ({default.file})"


def _shown(value: object) -> str:
    from ddplaunch.submit.slurm import Requeue, Setup

    if isinstance(value, Requeue):
        return f"{value.max_times}, warned by {value.warning} {value.before_the_end} s before the end"
    if isinstance(value, tuple):
        return ", ".join(each.text if isinstance(each, Setup) else str(each) for each in value)
    return str(value)


def _notes(flags: dict[str, Any]) -> Iterator[str]:
    said = remarks()
    yield from said.torchrun
    if said.alike:
        yield said.alike
    yield from _unheard()
    if flags["cpus_per_task"] is None and not any(
        "cpus-per" in arg or "exclusive" in arg for arg in flags["sbatch_args"]
    ):
        yield "without --cpus-per-task all ranks of a node share one CPU, unless the site's Slurm gives more"
    if flags["container_image"]:
        yield "the target is looked for in the image, not here"


def _unheard() -> Iterator[str]:
    """What is not heard, of files and of what they say."""
    context = click.get_current_context()
    yield from context.meta["unread"]
    system = SYSTEMS[context.params["scheduler"]]
    for name, option in context.meta.get("unheard", {}).items():
        yield f"{option} is not for a job of {system}, and not heard ({context.meta['defaults'][name].file})"


# -------------------------------------------------------------------------------------------------------- following


def _say(line: str) -> None:
    click.echo(f"ddplaunch: {line}", err=True)


def _follow(job: JobId, log: str) -> int:
    """Follow the job to its end, or leave it; Ctrl-C asks."""
    from ddplaunch.submit.follow import Follower
    from ddplaunch.submit.queue import cancel

    follower = Follower(job, sys.stdout.buffer, _say)
    while True:
        try:
            return follower.run()
        except KeyboardInterrupt:
            answer = _ask(job)
            code = EXIT_SIGNAL + 2
        except BrokenPipeError:  # `| head` has read enough
            answer = "d"
            code = EXIT_SIGNAL + 13
        if answer == "c":
            cancel(job)
        elif answer == "d":
            _say(f"job {job.number} goes on without us; its log: {log}")
            return code


def _ask(job: JobId) -> str:
    """What to do with the job: "c" is to cancel it, "d" to detach, anything else to follow on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "d"
    question = f"\nddplaunch: job {job.number}: [c]ancel it, [d]etach and let it run, or [f]ollow on? "
    click.echo(question, err=True, nl=False)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        answer = ""
    if not answer:  # Ctrl-C again, or Ctrl-D
        click.echo(err=True)
        return "d"
    return answer.strip().lower()[:1]
