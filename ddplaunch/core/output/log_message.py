"""ddplaunch's own log messages and their formatter: plain text, or one JSON object per line (``--log-json``).

They are only formatted here. The screen writes them while a job runs, ``cli/console_output.py`` before and after.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import ClassVar

from msgspec import Struct

from ddplaunch.system.plan.plan import Plan


class MessageKind(Struct, frozen=True):
    """The kind of a log message and its level. Features have kinds of their own."""

    name: str
    level: str = "info"

    NOTE: ClassVar[MessageKind]
    WAITING: ClassVar[MessageKind]
    RESTART: ClassVar[MessageKind]
    FAILURE: ClassVar[MessageKind]
    ERROR: ClassVar[MessageKind]
    END: ClassVar[MessageKind]


MessageKind.NOTE = MessageKind("note")
MessageKind.WAITING = MessageKind("waiting")  # for other nodes
MessageKind.RESTART = MessageKind("restart", "warning")
MessageKind.FAILURE = MessageKind("failure", "error")  # the failure report
MessageKind.ERROR = MessageKind("error", "error")  # the job cannot start
MessageKind.END = MessageKind("end")


class LogMessage(Struct, frozen=True):
    """A message of ddplaunch itself; ``fields``: additional JSON fields, listed in docs/json.md."""

    kind: MessageKind
    text: str
    fields: Mapping[str, object] = {}  # values may be objects with ``to_json``
    human_text: str | None = None  # the text form; None: the lines of ``text``, each with the prefix "ddplaunch: "


JSON_LINE_START = '{"source": "ddplaunch", '
"""The start of each JSON object, which distinguishes it from a line of a rank."""


class MessageFormatter:
    """Formats all messages of this process; there is one instance, as there is one stderr."""

    def __init__(self) -> None:
        self.as_json = False
        self.run_id: str | None = None
        self.node_rank: int | None = None  # None until assigned

    def set_origin(self, plan: Plan, *, numbered: bool = True) -> None:
        """Set the run id and node rank of all later messages; ``numbered``: the plan's node rank is final."""
        self.run_id = plan.run_id
        self.node_rank = plan.node_and_local_rank(plan.local_ranks[0])[0] if numbered else None

    def format(self, message: LogMessage) -> str:
        """Format a message as lines with newlines; "" for an empty message."""
        if self.as_json:
            return self._to_json(message) if message.text else ""
        if message.human_text is not None:
            return message.human_text
        return "".join(f"ddplaunch: {line}\n" for line in message.text.splitlines())

    def _to_json(self, message: LogMessage) -> str:
        kind = message.kind
        head = {"source": "ddplaunch", "kind": kind.name, "level": kind.level, "time": time.time()}
        origin = {"run_id": self.run_id, "node_rank": self.node_rank, "text": message.text}
        line = json.dumps({**head, **origin, **message.fields}, default=_to_plain_data, ensure_ascii=False)
        return line.encode(errors="backslashreplace").decode() + "\n"  # bytes of file names that are not UTF-8


FORMATTER = MessageFormatter()


def _to_plain_data(value: object) -> object:
    return value.to_json() if hasattr(value, "to_json") else str(value)
