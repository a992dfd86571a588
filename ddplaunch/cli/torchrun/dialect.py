"""torchrun's command line, read as ours: its options and those of torch.distributed.launch, and their PET_* variables.

Imported only where one of these names is seen. What each becomes is in docs/torchrun.md; where ddplaunch has no such
option, an error says what it has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NoReturn

from ddplaunch.cli.command_line import TranslatedArgv, is_option, option_name
from ddplaunch.cli.torchrun import nodes, output
from ddplaunch.cli.torchrun.options import (
    TorchrunOptions,
    TorchrunValue,
    TranslatedOption,
    read_pet_variables,
    split_torchrun,
)
from ddplaunch.cli.values import MAX_NAME
from ddplaunch.errors import UsageError

_STOP_SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
_PREEMPT_SIGNALS = {"SIGUSR1", "SIGUSR2", "SIGXCPU"}

_LOG_DIR_HINT = "--log-dir DIR keeps all that each rank printed: grep -h WORD DIR/*/rank-*.log"
_REPLACEMENTS = {
    "--duplicate-stdout-filters": _LOG_DIR_HINT,
    "--duplicate-stderr-filters": _LOG_DIR_HINT,
    "--logs-specs": "--log-dir DIR says where, --show RANKS what is shown",
}


def translate(
    words: Sequence[str],
    options: Mapping[str, bool],
    environ: Mapping[str, str],
    *,
    refused: Mapping[str, str] = {},
    skipped: Collection[str] = (),
) -> TranslatedArgv:
    """Replace torchrun's options before the target by ours; what follows it stays as it is.

    Args:
        options: every spelling of every option of the command, and whether it takes a value.
        environ: where PET_* are read; empty for a command that only hands on.
        refused: options that make no sense there, and what to do instead.
        skipped: what means something else there.

    Raises:
        UsageError: an option has no equivalent, or no such value; two contradict each other.
    """
    typed, ours, rest = split_torchrun(words, options, set(skipped))
    if "--print-completion" in typed:
        _print_completion(typed["--print-completion"])
    for name in typed:
        if name in refused:
            raise UsageError(f"{typed[name].source} does not work for a submitted job", refused[name])
    our_names = {option_name(word) for word in ours if is_option(word)}
    by_variable = read_pet_variables(environ, typed, our_names)
    torchrun = TorchrunOptions({**by_variable, **typed})
    made = list(_translate_options(torchrun))
    for name, source in {name: source for name, _, source in made}.items():
        if name in our_names and source in {each.source for each in typed.values()}:
            raise UsageError(f"{source} and {name} contradict each other", f"{source} is {name}: leave one of them out")
    new = [(name, value, source) for name, value, source in made if name not in our_names]
    of_torchrun = any(each.source not in options for each in typed.values())
    sources = {each.source for each in by_variable.values()}
    unsaid = frozenset(name for name, _, source in new if source in sources)
    flat = [word for name, value, _ in new for word in (name, value) if word]
    notes: list[str] = []
    if by_variable:
        notes.append(f"read as options of torchrun: {', '.join(sorted(sources))}")
    if torchrun.without_effect:
        idle = ", ".join(f"{each.source} {each.value}" for each in torchrun.without_effect)
        notes.append(f"no effect in ddplaunch: {idle} (docs/torchrun.md)")
    notes += torchrun.notes
    return TranslatedArgv([*flat, *ours, *rest], tuple(notes), of_torchrun, unsaid)


def _translate_options(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    _refuse_unsupported(torchrun)
    yield from torchrun.as_own_option("--nproc-per-node", "--nproc", {"xpu": "gpu"})
    yield from nodes.translate_rendezvous(torchrun)
    yield from nodes.translate_local_addr(torchrun)
    yield from _run_id(torchrun)
    yield from torchrun.as_own_option("--max-restarts")
    yield from torchrun.as_own_option("--role")
    yield from torchrun.as_own_option("--shutdown-timeout", "--grace")
    yield from torchrun.as_own_option("--numa-binding", "--bind", {"node": "numa"})
    yield from output.translate_output(torchrun)
    for flag in ("--virtual-local-rank", "--module", "--no-python"):
        if flag in torchrun and (flag != "--no-python" or "--run-path" not in torchrun):
            yield flag, "", torchrun.source(flag)
    torchrun.ignore_options("--monitor-interval", default="0.1")
    torchrun.ignore_options("--start-method", default="spawn")
    yield from _signals(torchrun)


def _run_id(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    """--rdzv-id as a name that can be one of a folder too: what cannot becomes a dash."""
    typed = torchrun.value("--rdzv-id")
    if typed and typed != "none":
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", typed)[:MAX_NAME].lstrip("_.-") or "job"
        if name != typed:
            torchrun.notes.append(f"{torchrun.source('--rdzv-id')} {typed}: the run is called {name}")
        yield "--run-id", name, torchrun.source("--rdzv-id")


def _signals(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    """A further signal, which torchrun hands on to the ranks: the scheduler's warning, in our words."""
    signals = {name.strip().upper() for name in torchrun.value("--signals-to-handle").split(",") if name.strip()}
    if not signals or signals == _STOP_SIGNALS:
        return
    source = torchrun.source("--signals-to-handle")
    further = sorted(signals - _STOP_SIGNALS)
    if len(further) > 1 or not _PREEMPT_SIGNALS.issuperset(further):
        other = further[1] if _PREEMPT_SIGNALS.issuperset(further[:1]) else further[0]
        raise UsageError(
            f"{source}: ddplaunch handles one signal beside {', '.join(sorted(_STOP_SIGNALS))}; {other} is too many"
            if other in _PREEMPT_SIGNALS
            else f"{source}: ddplaunch does not handle {other}",
            "--preempt-signal USR1 --preempt-forward USR1",
        )
    if further:
        name = further[0].removeprefix("SIG")
        yield "--preempt-signal", name, source
        yield "--preempt-forward", name, source
        yield from torchrun.as_own_option("--shutdown-timeout", "--preempt-grace")
    else:
        torchrun.ignore_options("--signals-to-handle")


def _refuse_unsupported(torchrun: TorchrunOptions) -> None:
    """Refuse what ddplaunch cannot do, and name what it can."""
    for name, hint in _REPLACEMENTS.items():
        if torchrun.value(name, "default") != "default":
            raise UsageError(f"{torchrun.source(name)} does not work in ddplaunch", hint)
    if (handler := torchrun.value("--event-log-handler", "null")) != "null":
        source = torchrun.source("--event-log-handler")
        raise UsageError(f"{source} {handler} does not work in ddplaunch", "--log-dir DIR writes events.jsonl")
    if (mode := torchrun.value("--numa-binding", "node")) != "node":
        source = torchrun.source("--numa-binding")
        raise UsageError(f"{source} {mode}: ddplaunch can bind only to the NUMA node of the GPU", "--bind numa")


def _print_completion(shell: TorchrunValue) -> NoReturn:
    """Print the script that completes ``ddplaunch`` in a shell, as torchrun does for itself, and end."""
    from ddplaunch.cli.commands import completion_script

    script = completion_script(shell.value)
    if script is None:
        raise UsageError(f"{shell.source} {shell.value}: unknown shell", "known: bash, zsh, fish")
    print(script)
    raise SystemExit(0)
