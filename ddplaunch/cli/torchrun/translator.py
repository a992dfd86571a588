"""Translates torchrun's options, those of torch.distributed.launch, and PET_* variables to ddplaunch's options.

Imported only if one of them occurs. docs/torchrun.md lists the translations. An option without an equivalent is an
error, whose hint names the closest feature.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NoReturn

from ddplaunch.base.errors import UsageError
from ddplaunch.base.options import option_words
from ddplaunch.cli.argv_splitter import TranslatedArgv, empty_value_error, is_option, option_name
from ddplaunch.cli.click_commands import completion_script
from ddplaunch.cli.torchrun import output_options, rendezvous_options
from ddplaunch.cli.torchrun.torchrun_options import (
    MAY_BE_EMPTY,
    TorchrunOptions,
    TorchrunValue,
    TranslatedOption,
    read_pet_variables,
    split_torchrun_options,
)
from ddplaunch.core.option_values import MAX_NAME

_STOP_SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
_PREEMPT_SIGNALS = {"SIGUSR1", "SIGUSR2", "SIGXCPU"}

_LOG_DIR_HINT = "--log-dir DIR keeps the whole output of each rank: grep -h WORD DIR/*/rank-*.log"
_REPLACEMENTS = {
    "--duplicate-stdout-filters": _LOG_DIR_HINT,
    "--duplicate-stderr-filters": _LOG_DIR_HINT,
    "--logs-specs": "use --log-dir DIR and --show RANKS",
}


def translate(
    words: Sequence[str],
    options: Mapping[str, bool],
    environ: Mapping[str, str],
    *,
    refused: Mapping[str, str] = {},
    skipped: Collection[str] = (),
) -> TranslatedArgv:
    """Replace torchrun's options before the target by ddplaunch's; the words from the target on are unchanged.

    Args:
        options: every spelling of every option of the command, and whether it takes a value.
        environ: the source of PET_* variables; {} for a command that passes options on.
        refused: options that the command rejects, and hints.
        skipped: options that have another meaning in the command.
    Raises UsageError if an option or value has no equivalent, or two options contradict each other.
    """
    typed, own, rest = split_torchrun_options(words, options, set(skipped))
    if "--print-completion" in typed:
        _print_completion(typed["--print-completion"])
    for name, (value, source) in typed.items():
        if name in refused:
            raise UsageError(f"{source} does not work for a submitted job", refused[name])
        if not value and name not in MAY_BE_EMPTY:  # an unset $NNODES: each machine would train alone
            raise empty_value_error(source)
    own_names = {option_name(word) for word in own if is_option(word)}
    by_variable = read_pet_variables(environ, typed, own_names)
    torchrun = TorchrunOptions({**by_variable, **typed})
    translated = list(_translate_options(torchrun))
    for name, source in {name: source for name, _, source in translated}.items():
        if name in own_names and source in {each.source for each in typed.values()}:
            raise UsageError(f"{source} and {name} contradict each other", f"{source} is {name}: leave one of them out")
    new = [(name, value, source) for name, value, source in translated if name not in own_names]
    is_torchrun = any(each.source not in options for each in typed.values())
    sources = {each.source for each in by_variable.values()}
    env_only = frozenset(name for name, _, source in new if source in sources)
    flat = [word for name, value, _ in new for word in (option_words(name, value) if value else (name,))]
    notes: list[str] = []
    if by_variable:
        notes.append(f"read as options of torchrun: {', '.join(sorted(sources))}")
    without_effect = tuple(f"{each.source} {each.value}" for each in torchrun.without_effect)
    if without_effect:
        notes.append(f"no effect in ddplaunch: {', '.join(without_effect)} (docs/torchrun.md)")
    notes += torchrun.notes
    return TranslatedArgv([*flat, *own, *rest], tuple(notes), is_torchrun, env_only, without_effect)


def _translate_options(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    _check_supported(torchrun)
    yield from torchrun.as_ddplaunch_option("--nproc-per-node", "--nproc", {"xpu": "gpu"})
    yield from rendezvous_options.translate_rendezvous(torchrun)
    yield from rendezvous_options.translate_local_addr(torchrun)
    yield from _run_id(torchrun)
    yield from torchrun.as_ddplaunch_option("--max-restarts")
    yield from torchrun.as_ddplaunch_option("--role")
    yield from torchrun.as_ddplaunch_option("--shutdown-timeout", "--grace")
    yield from torchrun.as_ddplaunch_option("--numa-binding", "--bind", {"node": "numa"})
    yield from output_options.translate_output(torchrun)
    for flag in ("--virtual-local-rank", "--module", "--no-python"):
        if flag in torchrun and (flag != "--no-python" or "--run-path" not in torchrun):
            yield flag, "", torchrun.source(flag)
    torchrun.ignore_options("--monitor-interval", default="0.1")
    torchrun.ignore_options("--start-method", default="spawn")
    yield from _signals(torchrun)


def _run_id(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    """Translate --rdzv-id to a run id, replacing characters that are invalid in a folder's name by dashes."""
    typed = torchrun.value("--rdzv-id")
    if typed and typed != "none":
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", typed)[:MAX_NAME].lstrip("_.-") or "job"
        if name != typed:
            torchrun.notes.append(f"{torchrun.source('--rdzv-id')} {typed}: the run is called {name}")
        yield "--run-id", name, torchrun.source("--rdzv-id")


def _signals(torchrun: TorchrunOptions) -> Iterator[TranslatedOption]:
    """Translate an additional signal, which torchrun forwards to the ranks, to ddplaunch's preemption signal."""
    signals = {name.strip().upper() for name in torchrun.value("--signals-to-handle").split(",") if name.strip()}
    if not signals or signals == _STOP_SIGNALS:
        return
    source = torchrun.source("--signals-to-handle")
    further = sorted(signals - _STOP_SIGNALS)
    if len(further) > 1 or not _PREEMPT_SIGNALS.issuperset(further):
        other = further[1] if _PREEMPT_SIGNALS.issuperset(further[:1]) else further[0]
        why = f"ddplaunch does not handle {other}"
        if other in _PREEMPT_SIGNALS:
            more = f"{len(further)} ({', '.join(further)})"
            why = f"ddplaunch handles one signal besides {', '.join(sorted(_STOP_SIGNALS))}, not {more}"
        raise UsageError(f"{source}: {why}", "--preempt-signal USR1 --preempt-forward USR1")
    if further:
        name = further[0].removeprefix("SIG")
        yield "--preempt-signal", name, source
        yield "--preempt-forward", name, source
        yield from torchrun.as_ddplaunch_option("--shutdown-timeout", "--preempt-grace")
    else:
        torchrun.ignore_options("--signals-to-handle")


def _check_supported(torchrun: TorchrunOptions) -> None:
    """Raise UsageError for options and values without an equivalent, with a hint at the closest feature."""
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
    """Print the completion script of ``ddplaunch`` for a shell, like torchrun's option, and exit."""
    script = completion_script(shell.value)
    if script is None:
        raise UsageError(f"{shell.source} {shell.value}: unknown shell", "known: bash, zsh, fish")
    print(script)
    raise SystemExit(0)
