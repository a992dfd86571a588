"""Reserves what the options of ``run`` request, before the job is planned, and prints what it waits for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_UNAVAILABLE, LaunchError, UsageError
from ddplaunch.base.options import Options
from ddplaunch.base.safe_files import open_for_writing
from ddplaunch.base.text import format_count, format_duration
from ddplaunch.cli.console_output import print_note, print_notes
from ddplaunch.core.option_values import AUTO
from ddplaunch.core.options import DryRun
from ddplaunch.features.reservations.claims import Claim, ClaimFile, Claims, OwnClaim, units_taken, user_name
from ddplaunch.features.reservations.free_gpus import QUEUE, GpuNeed, parse_free_gpus
from ddplaunch.features.reservations.lock_folder import find_lock_folder
from ddplaunch.features.reservations.options import Reservations
from ddplaunch.features.reservations.waiting import (
    JOB_VARIABLE,
    CountedNeed,
    Need,
    NotFree,
    PlaceNeed,
    reserve,
    waiting_for,
)
from ddplaunch.system.devices.cpu import read_cpu
from ddplaunch.system.plan.numbers import format_cpulist, parse_int
from ddplaunch.system.plan.planner import PlanSpec

LONG_WAIT_S = 300 * 86400.0  # a longer wait, like that of local jobs, is shown as no limit
START_VARIABLE = "DDPLAUNCH_START_FILE"
"""Names the file to make once a local job has what it waited for."""


def complete_spec(
    options: Options,
    spec: PlanSpec,
    *,
    is_remote: bool,
    keep: Callable[[OwnClaim], None],
    on_next: Callable[[PlanSpec], None],
) -> PlanSpec:
    """Return the planner's input with the GPUs that were reserved; ``keep`` is called with each reservation to hold.

    ``on_next`` is called when the run waits as the next in line, with the planner's input as it is with the first GPUs.

    A dry run reserves nothing and chooses GPUs that are free now. Raises UsageError.
    """
    count, jobs, wait_s = parse_free_gpus(spec.gpus), options[Reservations].jobs, options[Reservations].wait
    if is_remote:  # each host chooses its own
        return spec if count is None else replace(spec, gpus=None, nproc=spec.nproc or str(count))
    if spec.started_rank and (count or jobs):
        what = f"--gpus {spec.gpus}" if count else f"--jobs {jobs}"
        raise UsageError(f"{what} does not work where another launcher has started each rank", "leave it out")
    need = GpuNeed(count, os.environ) if count else None
    if options[DryRun].dry_run:
        return spec if need is None else replace(spec, gpus=_choose_gpus_now(need))
    guess = spec if need is None else replace(spec, gpus=_format_gpus(need, need.units[:count]))
    spec = _reserve_all(need, jobs, spec, wait_s, keep, lambda: on_next(guess))
    if path := os.environ.get(START_VARIABLE):
        os.close(open_for_writing(path, 0, 0o600))
    return spec


def _reserve_all(
    need: GpuNeed | None,
    jobs: str | None,
    spec: PlanSpec,
    wait_s: float | None,
    keep: Callable[[OwnClaim], None],
    on_next: Callable[[], None],
) -> PlanSpec:
    """Reserve a place first, then GPUs: all launchers in this order, so that none waits for another in a circle."""
    if not (need or jobs):
        return spec
    claims = _open_claims()
    if jobs:
        keep(_reserve(claims, _make_jobs_need(jobs, spec), wait_s, on_next)[0])
    if need:
        own, units = _reserve(claims, need, wait_s, on_next)
        keep(own)
        indices = need.indices(units)
        name = f"GPU{'s' * (len(indices) > 1)} {format_cpulist(indices)}"
        print_note(f"reserved {name} until this run ends", gpus=indices)
        return replace(spec, gpus=_format_gpus(need, units))
    return spec


def _format_gpus(need: GpuNeed, units: Sequence[str]) -> str:
    """Return GPUs as the value of ``--gpus``."""
    return ",".join(map(str, need.indices(units)))


def describe_wait(job: str) -> str | None:
    """Return what a local job waits for, and its place in the line: "waits for 2 free GPUs, 3 runs before it"."""
    files = _list_claims()
    own = next((each for each in files if each.claim.job == job and not each.has_units), None)
    if own is None:
        return None
    same = [each for each in files if each.claim.queue == own.claim.queue and each.order < own.order]
    before = len(waiting_for(same, own.claim.units))
    return f"waits for {own.claim.what}, {format_count(before, 'run') + ' before it' if before else 'next in line'}"


def find_launcher(job: str) -> int | None:
    """Return the PID of this user's launcher of a local job, if it lives and has or waits for something."""
    user = user_name(os.geteuid())
    return next((each.claim.pid for each in _list_claims() if each.claim.job == job and each.user == user), None)


def _list_claims() -> list[ClaimFile]:
    """Return all claims; none if there is no folder for them."""
    try:
        return Claims(find_lock_folder(os.environ)).list(None)
    except LaunchError:
        return []


def _open_claims() -> Claims:
    try:
        return Claims(find_lock_folder(os.environ))
    except LaunchError as error:
        raise UsageError(error.message, error.hint) from None


def _make_jobs_need(jobs: str, spec: PlanSpec) -> Need:
    """Return what a job without reserved GPUs waits for: one of ``--jobs N`` places, or free CPUs for its ranks."""
    if jobs != AUTO:
        return PlaceNeed(f"jobs-{os.geteuid()}", f"a place (--jobs {jobs})", 1, int(jobs))
    cpu = read_cpu("/sys")
    ranks = (spec.nproc and parse_int(spec.nproc)) or (cpu.physical if spec.nproc == "cpu" else 1)
    count = min(max(1, ranks), cpu.usable_count)
    return CountedNeed("cpus", format_count(count, "free CPU"), count, cpu.usable_count)


def _choose_gpus_now(need: GpuNeed) -> str:
    claims = _open_claims()
    with claims.lock():
        files = claims.list(QUEUE)
    units = need.choose(units_taken(files))
    if units is None:
        raise _explain_too_few(NotFree(need, files, 0), None)
    return _format_gpus(need, units)


def _reserve(
    claims: Claims, need: Need, wait_s: float | None, on_next: Callable[[], None]
) -> tuple[OwnClaim, tuple[str, ...]]:
    shown: int | None = None

    def on_wait(before: int, files: Sequence[ClaimFile]) -> None:
        nonlocal shown
        if shown is None and isinstance(need, GpuNeed):
            print_notes(*need.describe_users(files))
        if before != shown:
            limit = f", at most {format_duration(wait_s)}" if shown is None and wait_s and wait_s < LONG_WAIT_S else ""
            print_note(f"waiting for {need.what}{limit}: {_format_line_position(before)}", before=before)
            shown = before
            if before == 0:
                on_next()

    try:
        return reserve(claims, need, wait_s, on_wait)
    except NotFree as error:
        raise _explain_too_few(error, wait_s) from None
    except OSError as error:
        what = f"cannot reserve {need.what}: {error.filename or 'the lock folder'}: {error.strerror}"
        raise UsageError(what, "DDPLAUNCH_LOCK_DIR=FOLDER names another folder for locks") from None


def _format_line_position(before: int) -> str:
    return "next in line" if before == 0 else f"{format_count(before, 'run')} before this one"


def _explain_too_few(error: NotFree, wait_s: float | None) -> UsageError:
    """Print which processes have what the run needs, and return the error."""
    need, files = error.need, error.files
    waited = "" if wait_s is None else f" after {format_duration(wait_s)}"
    before = f", and {format_count(error.before, 'run')} that came first wait{'s' * (error.before == 1)}"
    waiting = before if error.before else ""
    hint = "--wait 2h waits for it, in order of arrival" if wait_s is None else "a longer --wait"
    if isinstance(need, GpuNeed):
        print_notes(*need.describe_users(files))
        free = need.count_free(files)
        what = f"{need.what} requested, but {free} of {need.total} {'is' if free == 1 else 'are'} free{waited}{waiting}"
    else:
        owners = dict.fromkeys(f"{each.user}, run of PID {each.claim.pid}" for each in files if each.has_units)
        print_notes(*(f"running: {each}" for each in [*owners][:8]))
        what = f"{need.what} is not free{waited}{waiting}"
    failed = UsageError(what, hint)
    failed.exit_code = EXIT_UNAVAILABLE
    return failed


def share_gpus(units: Sequence[str]) -> tuple[OwnClaim | None, list[str]]:
    """Claim the GPUs of a run that has not reserved any, so that no other one reserves them; also return notes.

    If that fails, the run goes on without a claim.
    """
    try:
        claims = Claims(find_lock_folder(os.environ))
        claim = Claim(QUEUE, "its GPUs", os.getpid(), os.environ.get(JOB_VARIABLE, ""), tuple(units), shared=True)
        own = claims.add(claim, waits=False)  # without the lock: to a process that decides now, this run comes later
        files = claims.list(QUEUE)
    except (LaunchError, OSError):
        return None, []
    reserved = units_taken([each for each in files if not each.claim.shared])
    owners = {each.name: each for unit, each in reserved.items() if unit in units}
    return own, [f"run of PID {each.claim.pid} ({each.user}) has reserved GPUs of this run" for each in owners.values()]
