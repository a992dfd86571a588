"""The prefix of each output line of a rank: the ``--prefix`` template, with field names in braces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ddplaunch.base.errors import UsageError, escape_control_chars, host_name
from ddplaunch.base.text import group_consecutive
from ddplaunch.system.plan.plan import Plan

DEFAULT_PREFIX = "[{rank}]"
NO_PREFIX = "none"
FIELDS = ("rank", "local_rank", "node_rank", "host", "role")

_FIELD = r"\{([^{}]*)\}"


def check_template(template: str) -> None:
    """Check a template: raises UsageError for an unknown field, an unbalanced brace or a control character."""
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
        raise UsageError(f"--prefix {shown}: unbalanced brace", f"known: {known}")
    if shown != template or "\n" in template or "\t" in template:
        raise UsageError(f"--prefix {shown}: control characters are not allowed", "use letters, digits and punctuation")
    if not template.strip():
        raise UsageError("--prefix is blank", f"--prefix {NO_PREFIX} omits the prefix")


def uses_rank_only(template: str) -> bool:
    """Whether ``{rank}`` is the only field, so that one prefix can name several ranks."""
    return {*re.findall(_FIELD, template)} == {"rank"}


def format_for_ranks(template: str, ranks: Sequence[int]) -> str:
    """Format the prefix of merged lines of several ranks: "[0-2,5]"."""
    ranges = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in group_consecutive(ranks))
    return template.replace("{rank}", ",".join(ranges)).rstrip()


def add_prefix(prefix: bytes, lines: bytes) -> bytes:
    """Add the prefix to each of these complete lines."""
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def make_prefixes(template: str, plan: Plan) -> tuple[dict[int, str], int]:
    """Return the prefix of each rank of this node, without the trailing blank, and the common width in columns.

    The width is that of the job's highest rank, so that lines stay aligned if all nodes print into one log.
    """
    if template == NO_PREFIX:
        return {}, 0
    node_values = {"host": host_name(), "role": plan.rank_environment(plan.local_ranks[0])["ROLE_NAME"]}

    def fill_template(rank: int, local_rank: int, node_rank: int | None) -> str:
        numbers = {"rank": rank, "local_rank": local_rank, "node_rank": "?" if node_rank is None else node_rank}
        values: dict[str, object] = {**node_values, **numbers}
        return re.sub(_FIELD, lambda match: str(values[match[1]]), template).rstrip()

    prefixes: dict[int, str] = {}
    for rank in plan.local_ranks:
        node_rank, local_rank = plan.node_and_local_rank(rank)
        prefixes[rank.rank] = fill_template(rank.rank, local_rank, node_rank)
    last = fill_template(plan.world_size - 1, max(rank.local_rank for rank in plan.local_ranks), plan.nnodes - 1)
    return prefixes, max(map(len, [*prefixes.values(), last]))
