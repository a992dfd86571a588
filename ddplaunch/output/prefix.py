"""What stands before each line of a rank: ``--prefix``, with the names of facts in braces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddplaunch import TYPE_CHECKING
from ddplaunch.errors import UsageError, harmless, host_name
from ddplaunch.words import runs

if TYPE_CHECKING:
    from ddplaunch.plan.plan import Plan

DEFAULT = "[{rank}]"
NONE = "none"
FIELDS = ("rank", "local_rank", "node_rank", "host", "role")

_FIELD = r"\{([^{}]*)\}"


def check(template: str) -> None:
    """Refuse a template with an unknown field, a lone brace, or what is not one line of text."""
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    shown = harmless(template)
    for name in re.findall(_FIELD, template):
        if name not in FIELDS:
            raise UsageError(f"--prefix {shown}: unknown field {{{harmless(name)}}}", f"known: {known}")
        if f"${{{name}}}" in template:
            raise UsageError(
                f"--prefix {shown}: {{{name}}} has a $ before it", f"--prefix '{shown.replace('${', '{')}'"
            )
    if re.search(r"[{}]", re.sub(_FIELD, "", template)):
        raise UsageError(f"--prefix {shown}: a brace has no partner", f"known: {known}")
    if shown != template or "\n" in template or "\t" in template:
        raise UsageError(f"--prefix {shown}: control characters do not work here", "use letters, digits and signs")
    if not template.strip():
        raise UsageError("--prefix is blank", f"--prefix {NONE} leaves it out")


def names_ranks_alone(template: str) -> bool:
    """Whether a prefix can be that of several ranks: the rank is its only field."""
    return {*re.findall(_FIELD, template)} == {"rank"}


def of_ranks(template: str, ranks: Sequence[int]) -> str:
    """The prefix of lines that several ranks have printed: "[0-2,5]"."""
    named = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs(ranks))
    return template.replace("{rank}", ",".join(named)).rstrip()


def prefixed(prefix: bytes, lines: bytes) -> bytes:
    """Put a prefix before each of these whole lines."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def prefixes(template: str, plan: Plan) -> tuple[dict[int, str], int]:
    """Return the prefix of each rank of this machine, without the blank behind it, and the columns that all take.

    The width is that of the job's highest rank here, so that lines are aligned wherever all nodes print into one log.
    """
    if template == NONE:
        return {}, 0
    facts = {"host": host_name(), "role": plan.environment(plan.local_ranks[0])["ROLE_NAME"]}

    def filled(rank: int, local_rank: int, node_rank: int | None) -> str:
        place = {"rank": rank, "local_rank": local_rank, "node_rank": "?" if node_rank is None else node_rank}
        known: dict[str, object] = {**facts, **place}
        return re.sub(_FIELD, lambda found: str(known[found[1]]), template).rstrip()

    found: dict[int, str] = {}
    for rank in plan.local_ranks:
        node_rank, local_rank = plan.where(rank)
        found[rank.rank] = filled(rank.rank, local_rank, node_rank)
    last = filled(plan.world_size - 1, max(rank.local_rank for rank in plan.local_ranks), plan.nnodes - 1)
    return found, max(map(len, [*found.values(), last]))
