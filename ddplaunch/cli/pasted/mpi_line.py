"""``mpirun``, ``mpiexec`` and ``horovodrun``: options of Open MPI 4, MPICH's Hydra and Horovod."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ddplaunch.cli.pasted.foreign_options import ForeignOptions, ForeignSyntax, TranslatedLine, split_foreign_options
from ddplaunch.system.plan.numbers import parse_int

# fmt: off
SYNTAX = ForeignSyntax(
    flags=frozenset({
        "--allow-run-as-root", "--oversubscribe", "--tag-output", "--display-map", "--report-bindings", "--verbose",
        "--quiet", "--do-not-launch", "--prefix-output", "--genvall",
    }),
    values=frozenset({
        "-n", "--host", "--hostfile", "-x", "--npernode", "--map-by", "--bind-to", "--rank-by", "--wdir",
        "--output-filename", "--genvlist", "--envlist", "--timeout",
    }),
    pairs=frozenset({"--mca", "--genv", "--env"}),
    aliases={
        "-np": "-n", "--np": "-n", "-c": "-n", "--n": "-n", "--num-proc": "-n", "-v": "--verbose", "-q": "--quiet",
        "-H": "--host", "-host": "--host", "-hosts": "--host", "--hosts": "--host", "-hostfile": "--hostfile",
        "-machinefile": "--hostfile", "--machinefile": "--hostfile", "-f": "--hostfile", "-N": "--npernode",
        "-npernode": "--npernode", "-ppn": "--npernode", "--ppn": "--npernode", "-mca": "--mca", "-genv": "--genv",
        "-env": "--env", "-genvall": "--genvall", "-genvlist": "--genvlist", "-wdir": "--wdir", "-map-by": "--map-by",
        "-bind-to": "--bind-to", "-l": "--tag-output", "-tag-output": "--tag-output",
    },
)
# fmt: on


def translate_mpi(words: Sequence[str], own: Mapping[str, bool]) -> TranslatedLine:
    """Translate the words after ``mpirun``."""
    own = {name: takes for name, takes in own.items() if name not in ("--env", "--hostfile", "--timeout")}
    given = split_foreign_options(words, SYNTAX, own)
    options, variables = list(given.own), list[str]()
    hosts, hostfile = given.take("--host"), given.take("--hostfile")
    options += _ranks(given, hosts, hostfile)
    for name, value in _variables(given):
        if hosts or hostfile:
            options += ["--env", name if value is None else f"{name}={value}"]
        elif value is not None:
            variables.append(f"{name}={value}")
    if given.given.get("--bind-to") == ["numa"]:
        options += ["--bind", "numa"]
    given.take("--allow-run-as-root", "--tag-output", "--prefix-output", "--quiet", "--verbose", "--genvall")
    given.take("--bind-to", "--rank-by", "--report-bindings")
    if given.take_flag("--oversubscribe"):
        options.append("--oversubscribe")
    if folder := given.take("--output-filename"):
        options += ["--log-dir", folder]
    if {given.take("--display-map"), given.take("--do-not-launch")} != {None}:
        options.append("--dry-run")
    return TranslatedLine(tuple(options), tuple(given.rest), tuple(variables), given.left_over())


def _ranks(given: ForeignOptions, hosts: str | None, hostfile: str | None) -> list[str]:
    """Translate mpirun's number of processes, which counts those of all hosts, to --nproc, --hosts or --hostfile."""
    total, per_node = given.take("-n"), given.take("--npernode")
    if found := re.fullmatch(r"ppr:(\d+):node.*", given.given.get("--map-by", [""])[-1]):
        per_node = found[1]
        given.take("--map-by")
    if hostfile:
        if total and not per_node:
            given.unknown.append(f"-n {total} (the slots of {hostfile} count)")
        return [*(["--nproc", per_node] if per_node else []), "--hostfile", hostfile]
    if not hosts or re.fullmatch(r"(localhost|127\.0\.0\.1)(:\d+)?", hosts):
        number = per_node or total or (hosts or "").partition(":")[2]
        return ["--nproc", number] if number else []
    return ["--hosts", ",".join(_fill_hosts(hosts.split(","), parse_int(total or ""), parse_int(per_node or "")))]


def _fill_hosts(hosts: Sequence[str], total: int | None, per_node: int | None) -> list[str]:
    """Return each host with the number of ranks that mpirun starts on it; mpirun fills the hosts in order."""
    names, slots = list[str](), list[int | None]()
    for each in hosts:
        name, _, text = each.partition(":")
        names.append(name)
        slots.append(per_node or parse_int(text))
    if total is None or None in slots:
        if total and not total % len(names) and slots == [None] * len(names):
            slots = [total // len(names)] * len(names)
        return [name if number is None else f"{name}:{number}" for name, number in zip(names, slots, strict=True)]
    filled, left = [], total
    for name, slot_count in zip(names, slots, strict=True):
        if used := min(slot_count or 0, left):
            filled.append(f"{name}:{used}")
            left -= used
    return filled


def _variables(given: ForeignOptions) -> list[tuple[str, str | None]]:
    """Return the variables that mpirun passes on, with their values; None: the value is that of this shell."""
    variables: list[tuple[str, str | None]] = []
    for text in given.given.pop("-x", []):
        name, equals, value = text.partition("=")
        variables.append((name, value if equals else None))
    for option in ("--genv", "--env"):
        for text in given.given.pop(option, []):
            name, _, value = text.partition(" ")
            variables.append((name, value))
    for option in ("--genvlist", "--envlist"):
        for text in given.given.pop(option, []):
            variables += [(name, None) for name in text.split(",")]
    return variables
