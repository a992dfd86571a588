"""What stands before each line of a rank: ``--prefix``, with the names of facts in braces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.errors import UsageError, escape_control_chars, host_name
from ddplaunch.words import group_consecutive

if TYPE_CHECKING:
    from ddplaunch.plan.plan import Plan

DEFAULT_PREFIX = "[{rank}]"
NO_PREFIX = "none"
FIELDS = ("rank", "local_rank", "node_rank", "host", "role")

_FIELD = r"\{([^{}]*)\}"


def check_template(template: str) -> None:
    """Refuse a template with an unknown field, a lone brace, or what is not one line of text."""
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    shown = escape_control_chars(template)
    for name in re.findall(_FIELD, template):
        if name not in FIELDS:
            raise UsageError(f"--prefix {shown}: unknown field {{{escape_control_chars(name)}}}", f"known: {known}")
        if f"${{{name}}}" in template:
            raise UsageError(
                f"--prefix {shown}: {{{name}}} has a $ before it", f"--prefix '{shown.replace('${', '{')}'"
            )
    if re.search(r"[{}]", re.sub(_FIELD, "", template)):
        raise UsageError(f"--prefix {shown}: a brace has no partner", f"known: {known}")
    if shown != template or "\n" in template or "\t" in template:
        raise UsageError(f"--prefix {shown}: control characters do not work here", "use letters, digits and signs")
    if not template.strip():
        raise UsageError("--prefix is blank", f"--prefix {NO_PREFIX} leaves it out")


def uses_rank_only(template: str) -> bool:
    """Whether a prefix can be that of several ranks: the rank is its only field."""
    return {*re.findall(_FIELD, template)} == {"rank"}


def format_for_ranks(template: str, ranks: Sequence[int]) -> str:
    """The prefix of lines that several ranks have printed: "[0-2,5]"."""
    named = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in group_consecutive(ranks))
    return template.replace("{rank}", ",".join(named)).rstrip()


def add_prefix(prefix: bytes, lines: bytes) -> bytes:
    """Put a prefix before each of these whole lines."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def make_prefixes(template: str, plan: Plan) -> tuple[dict[int, str], int]:
    """Return the prefix of each rank of this machine, without the blank behind it, and the columns that all take.

    The width is that of the job's highest rank here, so that lines are aligned wherever all nodes print into one log.
    """
    if template == NO_PREFIX:
        return {}, 0
    facts = {"host": host_name(), "role": plan.environment(plan.local_ranks[0])["ROLE_NAME"]}

    def filled(rank: int, local_rank: int, node_rank: int | None) -> str:
        place = {"rank": rank, "local_rank": local_rank, "node_rank": "?" if node_rank is None else node_rank}
        known: dict[str, object] = {**facts, **place}
        return re.sub(_FIELD, lambda found: str(known[found[1]]), template).rstrip()

    found: dict[int, str] = {}
    for rank in plan.local_ranks:
        node_rank, local_rank = plan.node_and_local_rank(rank)
        found[rank.rank] = filled(rank.rank, local_rank, node_rank)
    last = filled(plan.world_size - 1, max(rank.local_rank for rank in plan.local_ranks), plan.nnodes - 1)
    return found, max(map(len, [*found.values(), last]))
