"""torchrun's options: their names, and their values from the command line and PET_* variables.

The names are those of torch/distributed/run.py, get_args_parser, in torch 2.4 to 2.14.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import closest_match
from ddplaunch.cli.argv_splitter import end_of_options, is_option, option_name, underscores_to_dashes
from ddplaunch.system.plan.numbers import parse_int

# fmt: off
FLAGS = frozenset({"--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank", "--use-env"})
VALUES = frozenset({
    "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts",
    "--monitor-interval", "--start-method", "--event-log-handler", "--role", "--log-dir", "--redirects", "--tee",
    "--local-ranks-filter", "--duplicate-stdout-filters", "--duplicate-stderr-filters", "--node-rank", "--master-addr",
    "--master-port", "--local-addr", "--log-line-prefix-template", "--logs-specs", "--numa-binding",
    "--print-completion", "--signals-to-handle", "--shutdown-timeout",
})
# fmt: on
"""All options of torchrun, with dashes; torchrun accepts underscores too."""

MAY_BE_EMPTY = frozenset({"--rdzv-endpoint", "--rdzv-conf", "--local-ranks-filter"})
"""Options whose default in torchrun is the empty value."""

_SHORT_OPTIONS = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
_WITHOUT_VARIABLE = {"--logs-specs", "--numa-binding", "--print-completion", "--use-env"}

_VARIABLE = "PET_{}"  # PET_LOG_DIR is the default of --log-dir: torch/distributed/argparse_util.py
_OTHER_VARIABLES = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "--shutdown-timeout",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "--log-line-prefix-template",
}

_IN_RANK_VARIABLES = ("DDPLAUNCH_DEVICE", "TORCHELASTIC_RUN_ID")
"""Variables of a rank: there, PET_* variables were meant for the launcher of the rank."""

_KUBEFLOW_OPTIONS = {"--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--rdzv-id"}
"""Options whose variables ``clusters`` reads in Kubeflow pods, with more names for node rank and address."""

_RENDEZVOUS = {"--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf"}
_NODE_OPTIONS = {"--nnodes", "--node-rank", "--standalone", *_RENDEZVOUS}

TranslatedOption = tuple[str, str, str]  # name, value ("" for a flag), and source


class TorchrunValue(NamedTuple):
    value: str
    source: str  # the option as typed, or the variable


class TorchrunOptions:
    """The options that have a value; ``without_effect`` collects options without effect, ``notes`` all other notes."""

    def __init__(self, given: Mapping[str, TorchrunValue]) -> None:
        self._given = {name: each for name, each in given.items() if each.value}
        self.without_effect: list[TorchrunValue] = []
        self.notes: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def value(self, name: str, default: str = "") -> str:
        return self._given[name].value if name in self._given else default

    def source(self, name: str) -> str:
        return self._given[name].source

    def as_ddplaunch_option(
        self, name: str, own_name: str = "", values: Mapping[str, str] = {}
    ) -> Iterator[TranslatedOption]:
        """Translate to an option of ddplaunch, by default of the same name; ``values`` maps values, "" drops it."""
        value = self.value(name)
        if value := values.get(value, value):
            yield own_name or name, value, self.source(name)

    def ignore_options(self, *names: str, default: str = "") -> None:
        """Accept options that have no effect here; those with the default value need no note."""
        self.without_effect += [self._given[name] for name in names if self.value(name, default) != default]

    @property
    def max_nodes(self) -> int:
        """The maximum number of nodes; 1 if ``--nnodes`` is invalid."""
        return parse_int(self.value("--nnodes", "1").rpartition(":")[2]) or 1


def split_torchrun_options(
    words: Sequence[str], options: Mapping[str, bool], skipped: set[str]
) -> tuple[dict[str, TorchrunValue], list[str], list[str]]:
    """Split the words into torchrun's options, options that only ddplaunch has, and the rest from the target on."""
    torchrun_options = {**dict.fromkeys(FLAGS, False), **dict.fromkeys(VALUES, True)}
    typed: dict[str, TorchrunValue] = {}
    own: list[str] = []
    rest = list(words)
    while rest:
        if short := re.fullmatch(r"(-[rt])(\d.*)", rest[0]):
            rest[:1] = short.groups()
        word = option_name(rest[0])
        name = _SHORT_OPTIONS.get(word) or (word if word in options else _expand_prefix(word, torchrun_options))
        if word in skipped or (name not in torchrun_options and word not in options):
            break
        takes = torchrun_options[name] if name in torchrun_options else options[word]
        end = end_of_options(rest[: 1 + takes], {word: takes})
        if name not in torchrun_options:
            own += rest[:end]
        elif "=" in rest[0] and word.startswith("--"):
            typed[name] = TorchrunValue(rest[0].partition("=")[2], word)
        else:
            typed[name] = TorchrunValue(rest[1] if takes else "1", word)
        del rest[:end]
    if rest and is_option(rest[0]) and rest[0] not in skipped:
        _check_misspelling(option_name(rest[0]), torchrun_options, options)
    return typed, own, rest


def _expand_prefix(typed: str, torchrun_options: Collection[str]) -> str:
    """Return the full name of an option of torchrun; argparse accepts unique prefixes."""
    if not typed.startswith("--") or underscores_to_dashes(typed) in torchrun_options:
        return underscores_to_dashes(typed)
    matching = [name for name in torchrun_options if name.startswith(underscores_to_dashes(typed))]
    return matching[0] if len(matching) == 1 else underscores_to_dashes(typed)


def _check_misspelling(name: str, torchrun_options: Collection[str], options: Collection[str]) -> None:
    near = closest_match(underscores_to_dashes(name), {*options, *torchrun_options})
    if near in torchrun_options and near not in options:
        raise UsageError(f"no such option: {name}", f"did you mean torchrun's {near}?")


def read_pet_variables(
    environ: Mapping[str, str], typed: Mapping[str, TorchrunValue], own_names: set[str]
) -> dict[str, TorchrunValue]:
    """Return the options set by PET_* variables, except ``typed`` ones; ``own_names``: typed options of ddplaunch."""
    if any(environ.get(name) for name in _IN_RANK_VARIABLES):
        return {}
    values = {
        name: TorchrunValue(value, variable)
        for name in sorted((FLAGS | VALUES) - _WITHOUT_VARIABLE - typed.keys())
        if (value := environ.get(variable := _VARIABLE.format(name[2:].replace("-", "_").upper())))
    }
    for variable, name in _OTHER_VARIABLES.items():
        if name not in typed and (value := environ.get(variable)):
            values.setdefault(name, TorchrunValue(value, variable))
    for name in FLAGS & values.keys():
        value, variable = values[name]
        if value not in ("0", "1"):
            raise UsageError(f"{variable}={value}: expected 0 or 1", f"unset {variable}")
        if value == "0":
            del values[name]
    excluded = set[str]()
    if own_names & {"--hosts", "--hostfile"} or "--standalone" in typed:
        excluded = _KUBEFLOW_OPTIONS | _NODE_OPTIONS
    elif _is_kubeflow_pod(values, typed):
        excluded = _KUBEFLOW_OPTIONS
    return {name: each for name, each in values.items() if name not in excluded}


def _is_kubeflow_pod(values: Mapping[str, TorchrunValue], typed: Mapping[str, TorchrunValue]) -> bool:
    """Whether PET_* variables may be those of a multi-pod Kubeflow job; cluster detection then reads them."""
    nnodes = values["--nnodes"].value if "--nnodes" in values else "1"
    backend = values["--rdzv-backend"].value if "--rdzv-backend" in values else "static"
    elsewhere = _NODE_OPTIONS & typed.keys() or {"--rdzv-endpoint", "--standalone"} & values.keys()
    return nnodes not in ("1", "1:1") and ":" not in nnodes and backend == "static" and not elsewhere
