"""torchrun's command line, read as ours: its options and those of torch.distributed.launch, and their PET_* variables.

Words in, words out, for whichever command reads them next; imported only where one of these names is seen. What each
becomes stands in docs/torchrun.md; where we have no such thing, an error says what we have. The names are those of
torch/distributed/run.py, get_args_parser, in torch 2.4 to 2.14.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from ddplaunch.cli.command_line import end_of_ours, hyphened, is_option, name_of
from ddplaunch.cli.torchrun import nodes, output
from ddplaunch.cli.torchrun.asked import Asked, Said, Word
from ddplaunch.errors import UsageError

FLAGS = frozenset(
    {"--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank", "--use-env"},
)
VALUES = frozenset(
    {
        "--nnodes",
        "--nproc-per-node",
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--rdzv-conf",
        "--max-restarts",
        "--monitor-interval",
        "--start-method",
        "--event-log-handler",
        "--role",
        "--log-dir",
        "--redirects",
        "--tee",
        "--local-ranks-filter",
        "--duplicate-stdout-filters",
        "--duplicate-stderr-filters",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--local-addr",
        "--log-line-prefix-template",
        "--logs-specs",
        "--numa-binding",
        "--print-completion",
        "--signals-to-handle",
        "--shutdown-timeout",
    }
)
"""All that there are, with dashes; torchrun takes each with underscores too."""

_SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
_WITHOUT_VARIABLE = {"--logs-specs", "--numa-binding", "--print-completion", "--use-env"}

_VARIABLE = "PET_{}"  # PET_LOG_DIR is --log-dir where that is not typed: torch/distributed/argparse_util.py
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

_INSIDE = ("DDPLAUNCH_DEVICE", "TORCHELASTIC_RUN_ID")
"""A rank has these; the variables were meant for the launcher that has started it."""

_KUBEFLOW = {"--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--rdzv-id"}
"""What ``clusters/kubeflow.py`` reads, which knows more names for the node's rank and address than torchrun does."""

_RENDEZVOUS = {"--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf"}
_OF_NODES = {"--nnodes", "--node-rank", "--standalone", *_RENDEZVOUS}

_CAUGHT = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
_WARNINGS = {"SIGUSR1", "SIGUSR2", "SIGXCPU"}

_KEPT = "--log-dir DIR keeps all that each rank printed: grep -h WORD DIR/*/rank-*.log"
_INSTEAD = {
    "--duplicate-stdout-filters": _KEPT,
    "--duplicate-stderr-filters": _KEPT,
    "--logs-specs": "--log-dir DIR says where, --show RANKS what is shown",
}


class Translation(NamedTuple):
    """The words to read instead, and what people should know of it.

    Attributes:
        of_torchrun: one of the options typed is torchrun's alone: so all behind the target is the program's.
        unsaid: options of ours that variables alone say: what is typed anywhere goes before them.
    """

    words: list[str]
    notes: tuple[str, ...]
    of_torchrun: bool
    unsaid: frozenset[str]


def translate(
    words: Sequence[str],
    options: Mapping[str, bool],
    environ: Mapping[str, str],
    *,
    refused: Mapping[str, str] = {},
    skipped: Collection[str] = (),
) -> Translation:
    """Replace torchrun's options before the target by ours; what stands behind it is not looked at.

    Args:
        options: every spelling of every option of the command, and whether it takes a value.
        environ: where PET_* are read; empty for a command that only hands on.
        refused: options that make no sense there, and what to do instead. skipped: what means something else there.

    Raises:
        UsageError: an option has no equivalent, or no such value; two contradict each other.
    """
    asked, kept, rest = _split(words, options, set(skipped))
    if "--print-completion" in asked:
        _print_completion(asked["--print-completion"])
    for name in asked:
        if name in refused:
            raise UsageError(f"{asked[name].source} is not for a submitted job", refused[name])
    typed = {name_of(word) for word in kept if is_option(word)}
    found = _variables(environ, asked, typed)
    everything = Asked({**found, **asked})
    made = list(_words(everything))
    for name, source in {name: source for name, _, source in made}.items():
        if name in typed and source in {each.source for each in asked.values()}:
            raise UsageError(f"{source} and {name} contradict each other", f"{source} is {name}: leave one of them out")
    produced = [word for name, value, _ in made if name not in typed for word in ([name, value] if value else [name])]
    of_torchrun = any(each.source not in options for each in asked.values())
    variables = {each.source for each in found.values()}
    unsaid = frozenset(name for name, _, source in made if source in variables and name not in typed)
    return Translation([*produced, *kept, *rest], tuple(_notes(found, everything.idle)), of_torchrun, unsaid)


def _split(
    words: Sequence[str], options: Mapping[str, bool], skipped: set[str]
) -> tuple[dict[str, Said], list[str], list[str]]:
    """Tell torchrun's options from those that are ours alone, and both from what follows."""
    theirs = {**dict.fromkeys(FLAGS, False), **dict.fromkeys(VALUES, True)}
    asked: dict[str, Said] = {}
    kept: list[str] = []
    rest = list(words)
    while rest:
        if joined := re.fullmatch(r"(-[rt])(\d.*)", rest[0]):
            rest[:1] = joined.groups()
        typed = name_of(rest[0])
        name = _SHORT.get(typed) or (typed if typed in options else _whole(typed, theirs))
        if typed in skipped or (name not in theirs and typed not in options):
            break
        takes = theirs[name] if name in theirs else options[typed]
        end = end_of_ours(rest[: 1 + takes], {typed: takes})
        if name not in theirs:
            kept += rest[:end]
        elif "=" in rest[0] and typed.startswith("--"):
            asked[name] = Said(rest[0].partition("=")[2], typed)
        else:
            asked[name] = Said(rest[1] if takes else "1", typed)
        del rest[:end]
    if rest and is_option(rest[0]) and rest[0] not in skipped:
        _check_slip(name_of(rest[0]), theirs, options)
    return asked, kept, rest


def _whole(typed: str, theirs: Collection[str]) -> str:
    """The option of torchrun's that was typed in full or, as argparse allows, so far that it can be no other."""
    if not typed.startswith("--") or hyphened(typed) in theirs:
        return hyphened(typed)
    meant = [name for name in theirs if name.startswith(hyphened(typed))]
    return meant[0] if len(meant) == 1 else hyphened(typed)


def _check_slip(name: str, theirs: Iterable[str], options: Iterable[str]) -> None:
    import difflib

    near = difflib.get_close_matches(hyphened(name), [*options, *theirs], 1, 0.75)
    if near and near[0] in set(theirs) - set(options):
        raise UsageError(f"no such option: {name}", f"did you mean torchrun's {near[0]}?")


def _variables(environ: Mapping[str, str], asked: Mapping[str, Said], typed: set[str]) -> dict[str, Said]:
    """The options that nobody typed, from PET_*."""
    if any(environ.get(name) for name in _INSIDE):
        return {}
    found = {
        name: Said(value, variable)
        for name in sorted((FLAGS | VALUES) - _WITHOUT_VARIABLE - asked.keys())
        if (value := environ.get(variable := _VARIABLE.format(name[2:].replace("-", "_").upper())))
    }
    if seconds := environ.get(_SHUTDOWN):
        found.setdefault("--shutdown-timeout", Said(seconds, _SHUTDOWN))
    for name in FLAGS & found.keys():
        value, variable = found[name]
        if value not in ("0", "1"):
            raise UsageError(f"{variable}={value} is neither 0 nor 1", f"unset {variable}")
        if value == "0":
            del found[name]
    left = _KUBEFLOW | _OF_NODES if typed & {"--hosts", "--hostfile"} or "--standalone" in asked else set[str]()
    if not left and _is_a_pod(found, asked):
        left = _KUBEFLOW
    return {name: each for name, each in found.items() if name not in left}


def _is_a_pod(found: Mapping[str, Said], asked: Mapping[str, Said]) -> bool:
    """Whether the variables may be Kubeflow's, of a job of so many pods: then they are left to the surroundings."""
    nnodes = found["--nnodes"].value if "--nnodes" in found else "1"
    backend = found["--rdzv-backend"].value if "--rdzv-backend" in found else "static"
    elsewhere = _OF_NODES & asked.keys() or {"--rdzv-endpoint", "--standalone"} & found.keys()
    return nnodes not in ("1", "1:1") and ":" not in nnodes and backend == "static" and not elsewhere


def _notes(found: Mapping[str, Said], idle: Sequence[Said]) -> Iterator[str]:
    if found:
        yield f"read as torchrun's options: {', '.join(sorted(each.source for each in found.values()))}"
    if idle:
        names = ", ".join(f"{each.source} {each.value}" for each in idle)
        yield f"without effect here: {names} (docs/torchrun.md)"


def _words(asked: Asked) -> Iterator[Word]:
    """What we call all of it."""
    _refuse(asked)
    yield from asked.plainly("--nproc-per-node", "--nproc", {"xpu": "gpu"})
    yield from nodes.words(asked)
    yield from nodes.local_address(asked)
    yield from asked.plainly("--rdzv-id", "--run-id", {"none": ""})
    yield from asked.plainly("--max-restarts", "--max-restarts")
    yield from asked.plainly("--role", "--role")
    yield from asked.plainly("--shutdown-timeout", "--grace")
    yield from asked.plainly("--numa-binding", "--bind", {"node": "numa"})
    yield from output.words(asked)
    for flag in ("--virtual-local-rank", "--module"):
        if flag in asked:
            yield flag, "", asked.source(flag)
    if "--no-python" in asked and "--run-path" not in asked:
        yield "--no-python", "", asked.source("--no-python")
    asked.ignore("--monitor-interval", default="0.1")
    asked.ignore("--start-method", default="spawn")
    asked.ignore("--log-line-prefix-template")
    yield from _signals(asked)


def _signals(asked: Asked) -> Iterator[Word]:
    """A further signal that stops a job, handed on to the ranks: that is what we call the scheduler's warning."""
    signals = {name.strip().upper() for name in asked.value("--signals-to-handle").split(",") if name.strip()}
    if not signals or signals == _CAUGHT:
        return
    source = asked.source("--signals-to-handle")
    further = sorted(signals - _CAUGHT)
    if len(further) > 1 or not _WARNINGS.issuperset(further):
        other = further[1] if _WARNINGS.issuperset(further[:1]) else further[0]
        raise UsageError(
            f"{source}: beside the four that stop a job there is one that warns, and {other} is too many"
            if other in _WARNINGS
            else f"{source}: {other} neither stops a job here nor warns",
            "--preempt-signal USR1 --preempt-forward USR1",
        )
    if further:
        name = further[0].removeprefix("SIG")
        yield "--preempt-signal", name, source
        yield "--preempt-forward", name, source
        yield from asked.plainly("--shutdown-timeout", "--preempt-grace")
    else:
        asked.ignore("--signals-to-handle")


def _refuse(asked: Asked) -> None:
    """Name what we have instead where torchrun's value does not say it."""
    for name, hint in _INSTEAD.items():
        if asked.value(name, "default") != "default":
            raise UsageError(f"{asked.source(name)}: ddplaunch has no such thing", hint)
    if (handler := asked.value("--event-log-handler", "null")) != "null":
        source = asked.source("--event-log-handler")
        raise UsageError(f"{source} {handler}: torch's handlers are not loaded", "--log-dir DIR keeps events.jsonl")
    if (mode := asked.value("--numa-binding", "node")) != "node":
        source = asked.source("--numa-binding")
        raise UsageError(f"{source} {mode}: ddplaunch binds a rank to the NUMA node beside its GPU", "--bind numa")


def _print_completion(asked: Said) -> NoReturn:
    """Print the script that completes ``ddplaunch`` in a shell, as torchrun does for itself, and end."""
    import click
    from click.shell_completion import get_completion_class

    from ddplaunch.cli import COMPLETE, cli

    found = get_completion_class(asked.value)
    if found is None:
        raise UsageError(f"{asked.source} {asked.value}: unknown shell", "known are bash, zsh and fish")
    click.echo(found(cli, {}, "ddplaunch", COMPLETE).source())
    click.get_current_context().exit()
