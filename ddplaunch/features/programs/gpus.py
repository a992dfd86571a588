"""Divides the GPUs of this machine among programs and ranks, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ddplaunch.base.errors import UsageError
from ddplaunch.base.text import format_count, group_consecutive, join_names
from ddplaunch.features.programs.spec import ProgramSpec
from ddplaunch.system.devices.visible_gpus import visible_gpus
from ddplaunch.system.plan.hardware import Hardware

ALL = "all"
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""With this variable, a program's indices of GPUs are the same as in ``ddplaunch devices``."""


class GpuDivision(NamedTuple):
    """The GPUs of each program, by index; ``rest``: the value of ``--gpus`` for the ranks, None: not restricted."""

    by_program: dict[str, tuple[int, ...]]
    rest: str | None


def divide_gpus(
    specs: Iterable[ProgramSpec],
    target: ProgramSpec | None,
    target_gpus: str | None,
    hardware: Hardware,
    environ: Mapping[str, str],
) -> GpuDivision:
    """Divide the GPUs: lists first, then numbers in the order of the programs; the ranks get the rest.

    ``specs``, ``target``: the programs of this node, and that of its ranks, None without any; ``target_gpus``: the
    value of ``--gpus``. Raises UsageError if there are too few GPUs, or one is given twice.
    """
    wanted = {each.name: each.gpus for each in specs if each.gpus not in ("", 0)}
    name, count = (target.name, target.gpus) if target else ("", "none")
    target_gpus = target_gpus if target else "none"
    if not wanted and not count:
        return GpuDivision({}, None)
    visible = [each.gpu.index for each in visible_gpus(hardware, None, environ).gpus]
    given = {each: _read_list(hardware, gpus, environ) for each, gpus in wanted.items() if _is_list(gpus)}
    target_list = target_gpus or (count if _is_list(count) else None)
    if target_list and target_list != "none":
        given[name] = _read_list(hardware, target_list, environ)
    _check_no_gpu_given_twice(given)
    free = [each for each in visible if not any(each in taken for taken in given.values())]
    counts = {each: gpus for each, gpus in wanted.items() if each not in given}
    if count and name not in given and not _is_list(count):
        counts[name] = count
    shares = _assign_free_gpus(counts, free, len(visible), given)
    by_program = {each: (given | shares)[each] for each in wanted}
    used = {index for taken in by_program.values() for index in taken}
    if target_gpus or name in given | shares:
        mine = (given | shares).get(name)
        return GpuDivision(by_program, target_gpus or _format_list(mine or ()))
    rest = [each for each in visible if each not in used]
    if not rest:
        what = f"{_describe(by_program)}, so {name} gets none of {format_count(len(visible), 'GPU')}"
        raise UsageError(what, "--gpus none runs it on CPUs")
    return GpuDivision(by_program, _format_list(rest))


def _is_list(gpus: object) -> bool:
    return isinstance(gpus, str) and gpus not in ("", ALL)


def _read_list(hardware: Hardware, text: object, environ: Mapping[str, str]) -> tuple[int, ...]:
    return tuple(each.gpu.index for each in visible_gpus(hardware, str(text), environ).gpus)


def _format_list(indices: Sequence[int]) -> str:
    return ",".join(map(str, indices))


def _check_no_gpu_given_twice(given: Mapping[str, Sequence[int]]) -> None:
    """Raise UsageError if two programs name the same GPU."""
    for index in sorted({index for taken in given.values() for index in taken}):
        owners = [name for name, taken in given.items() if index in taken]
        if len(owners) > 1:
            raise UsageError(f"GPU {index} is given to {join_names(owners)}", _format_table(given))


def _format_table(given: Mapping[str, Sequence[int]]) -> str:
    width = max(map(len, given))
    return "\n".join(f"{name:<{width}}  {format_gpus(taken) or 'none'}" for name, taken in given.items())


def format_gpus(indices: Sequence[int]) -> str:
    """Describe GPUs by their indices: "0-3,6"."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in group_consecutive(indices))


def _assign_free_gpus(
    counts: Mapping[str, int | str], free: Sequence[int], visible: int, given: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Return the GPUs for each program from the free ones: as many as it requests."""
    least = sum(each if isinstance(each, int) else 1 for each in counts.values())
    if least > len(free):
        wants = {**{name: len(taken) for name, taken in given.items()}, **counts}
        (first, number), *others = wants.items()
        listed = [f"{first} wants {'all' if number == ALL else format_count(int(number), 'GPU')}"]
        listed += [f"{name} {number}" for name, number in others]
        raise UsageError(f"{join_names(listed)}, and {visible} are visible", "`ddplaunch devices` lists them")
    left, shares = list(free), {}
    for name, count in counts.items():
        taken = len(left) - (least - 1) if count == ALL else int(count)
        shares[name], left = tuple(left[:taken]), left[taken:]
        least -= 1 if count == ALL else int(count)
    return shares


def _describe(by_program: Mapping[str, Sequence[int]]) -> str:
    return join_names(f"{name} has GPUs {format_gpus(taken)}" for name, taken in by_program.items())


def gpu_variables(hardware: Hardware, indices: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a command sees exactly these GPUs: numbers, as not all programs read UUIDs."""
    if not indices:
        return dict(visible_gpus(hardware, "none", environ).environ)
    return {**ORDER, **visible_gpus(hardware, _format_list(indices), {**environ, **ORDER}).environ}
