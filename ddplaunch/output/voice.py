"""What ddplaunch itself says, in one of two forms: lines for people, or an object of JSON a line (``--log-json``).

Here it is only put into a form. The screen writes it while a job runs, ``cli/say.py`` before and after.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from enum import Enum

from ddplaunch import TYPE_CHECKING
from ddplaunch.dataclass import dataclass

if TYPE_CHECKING:
    from ddplaunch.plan.plan import Plan


class MessageKind(Enum):
    """What is said, and how grave it is."""

    NOTE = "note", "info"
    WAITING = "waiting", "info"  # for other nodes
    RESTART = "restart", "warning"
    STACKS = "stacks", "info"  # what the ranks do, as the user has asked
    FAILURE = "failure", "error"  # the report
    ERROR = "error", "error"  # what keeps the job from starting
    END = "end", "info"

    @property
    def level(self) -> str:
        return self.value[1]


@dataclass(frozen=True)
class LogMessage:
    """One thing that is said; ``fields`` are its own in JSON, as ``tests/reference/records.py`` has them."""

    kind: MessageKind
    text: str
    fields: Mapping[str, object] = {}  # a verdict in it may be an object with ``to_json``
    human_text: str | None = None  # what people read; None for the text, each line with our name before it


JSON_LINE_START = '{"source": "ddplaunch", '
"""How each object begins, so that it can be told from a line of a rank."""


class MessageFormatter:
    """The form of all that this process says: there is one, as there is one stderr."""

    def __init__(self) -> None:
        self.as_json = False
        self.run_id: str | None = None
        self.node_rank: int | None = None  # None until this node has one

    def set_origin(self, plan: Plan, *, numbered: bool = True) -> None:
        """Say from now on which job and node speaks; ``numbered``: the node's rank in the plan is final."""
        self.run_id = plan.run_id
        self.node_rank = plan.node_and_local_rank(plan.local_ranks[0])[0] if numbered else None

    def format(self, said: LogMessage) -> str:
        """The lines to write, with their newlines; "" where there is nothing to say."""
        if self.as_json:
            return self._to_json(said) if said.text else ""
        if said.human_text is not None:
            return said.human_text
        return "".join(f"ddplaunch: {line}\n" for line in said.text.splitlines())

    def _to_json(self, said: LogMessage) -> str:
        name, level = said.kind.value
        head = {"source": "ddplaunch", "kind": name, "level": level, "time": time.time()}
        place = {"run_id": self.run_id, "node_rank": self.node_rank, "text": said.text}
        return json.dumps({**head, **place, **said.fields}, default=_to_plain_data) + "\n"


FORMATTER = MessageFormatter()


def _to_plain_data(value: object) -> object:
    return value.to_json() if hasattr(value, "to_json") else str(value)


def without_node_fields(line: bytes) -> bytes:
    """An object of ours without what differs between nodes that say the same."""
    try:
        said = json.loads(line)
    except ValueError:  # cut, or not ours
        return line
    return json.dumps({name: value for name, value in said.items() if name not in ("time", "node_rank")}).encode()
