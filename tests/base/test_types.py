"""Tests of random messages from another machine: each is accepted within its bounds or refused."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import math
import random
import re
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

import ddplaunch
from ddplaunch.base.errors import MAX_TAIL_LINES, MAX_TEXT_CHARS, escape_control_chars, sanitize_line, sanitize_text
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.types import MAX_COUNT, TaggedMessage, TailLines, as_dict, convert, decode, encode
from ddplaunch.cli.failure_text import render_verdict
from ddplaunch.core import messages
from ddplaunch.core.control_socket.server import list_request_types
from ddplaunch.core.events import EVENT_TYPES
from ddplaunch.core.failures import FailureReport
from ddplaunch.core.feature_registry import load_features
from ddplaunch.core.job.rpc import convert_payload
from ddplaunch.features.doctor import messages as doctor_messages
from ddplaunch.observe.history.run_record import RunRecord
from tests.core.job.job_steps import joined

TO_NODE_ZERO = load_features().message_types(messages.FromNode)

OTHERS = [
    kind
    for kind in messages.Message.__subclasses__()
    if not (kind.__subclasses__() or kind is messages.ConnectingToNodeZero)
]

KINDS = [*OTHERS, *TO_NODE_ZERO, *load_features().message_types(messages.FromNodeZero)]
"""All that nodes ever send."""

RPC_KINDS = [module.KIND for module in load_features().modules("rpc_kinds")]
"""The requests to all nodes, each with the types of its payloads."""

CONTROL_SOCKET = list(dict.fromkeys(each for kind in list_request_types() for each in (kind, *kind.answers)))
"""Requests of the control socket, and their replies."""

DOCTOR = [kind for kind in TaggedMessage.__subclasses__() if kind.__module__.startswith(doctor_messages.__package__)]

HISTORY = [RunRecord, *EVENT_TYPES.values()]
"""All that is read of a run that is over."""


PAYLOADS = [each for kind in RPC_KINDS for each in (kind.request, kind.reply) if issubclass(each, Struct)]


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a class's fields, with their bounds."""
    return typing.get_type_hints(kind, include_extras=True)


def classes(kind: type) -> Iterator[type]:
    """A class, and those of its fields."""
    yield kind
    for hint in field_types(kind).values():
        yield from _within(hint)


def is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Struct)


def _within(hint: Any) -> Iterator[type]:
    if is_struct(hint):
        yield from classes(hint)
    for inner in typing.get_args(hint):
        yield from _within(inner)


def unbounded(hint: Any) -> bool:
    """Whether a number or a text of this type may be anything."""
    if typing.get_origin(hint) in (typing.Annotated, typing.Literal):
        return False
    return hint in (int, float, str) or any(map(unbounded, typing.get_args(hint)))


def test_every_field_has_its_bounds():
    found = {
        f"{each.__name__}.{name}": hint
        for kind in [*KINDS, *CONTROL_SOCKET, *HISTORY, *DOCTOR, *PAYLOADS]
        for each in classes(kind)
        for name, hint in field_types(each).items()
    }
    assert len(found) > 200
    assert [name for name, hint in found.items() if unbounded(hint)] == []


NUMBERS = [
    *(0, 1, 2, 3, 9, 15, 40, 64, 65, 255, 256, -1, 4096),
    *(MAX_COUNT, MAX_COUNT + 1, 1 << 31, 1 << 63, 1 << 64, 10**30),
]
REALS = [0.0, 0.5, 1.0, 15.0, 1e9, 1e308, -1.0, 604800.0, 604801.0]
TEXTS = [
    "", "x", "n1", "2", "..", "../../etc", "a/b", "\0", "\x1b[31mred\x1b[0m", "\x1b]0;t\x07", "a\rb", "a\r\nb",
    "\x9b2J",
    "\u202eevil", "one\ntwo\nddplaunch: three", "x" * 300, "y" * (MAX_TEXT_CHARS + 9), "l\n" * 70_000,
    "é\u3000ж", "\u2028",
]  # fmt: skip


def test_a_message_is_one_object_without_its_defaults():
    message = messages.StopRequested(2)
    assert encode(message)[4:] == b'{"op":"StopRequested","signal":2}'
    assert as_dict(message) == {"signal": 2, "again": False, "reason": ""}, "what users read has all fields"


def test_data_is_converted_to_types_in_one_place():
    """A conversion elsewhere would check bounds, but not sanitize texts."""
    paths = [path for path in Path(ddplaunch.__file__).parent.rglob("*.py") if path.name != "types.py"]
    found = {path.name for path in paths if re.search(r"msgspec\.convert\(|json\.decode\(.*type=", path.read_text())}
    # The types of one have no texts, of another only texts that are compared with a constant; what the API server sends
    # is sanitized where it becomes a sentence.
    assert found == {"remote_launcher.py", "torch_trace.py", "objects.py"}


class Maker:
    """Well-formed messages out of chance."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, hint: Any) -> Any:
        """Something of this type, as JSON has it."""
        pick = self.random.choice
        if is_struct(hint):
            return {name: self.value(field_types(hint)[name]) for name in hint.__struct_fields__}
        if typing.get_origin(hint) is typing.Annotated:
            return self.value(typing.get_args(hint)[0])
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            return self.value(pick(typing.get_args(hint)))
        if typing.get_origin(hint) is tuple:
            inner = typing.get_args(hint)
            if inner[1:] == (...,):
                return [self.value(inner[0]) for _ in range(pick((0, 1, 1, 2, 3)))]
            return [self.value(each) for each in inner]
        if typing.get_origin(hint) is typing.Literal:
            return pick((*typing.get_args(hint), "x"))
        if hint in (type(None), Any):
            return None
        if hint is bytes:
            return pick(("", "eA==", "AAECAw==", "x", "日"))
        if hint is bool:
            return pick((True, False))
        if hint is int:
            return pick(NUMBERS[: pick((6, 6, 6, len(NUMBERS)))])
        if hint is float:
            return pick(REALS[: pick((5, 5, 5, len(REALS)))])
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return pick([each.value for each in hint])
        if received := getattr(hint, "received", None):
            return [self.value(str) for _ in range(pick((0, 1, 20)))] if received is list else self.value(received)
        assert hint is str
        return pick(TEXTS[: pick((4, 4, 4, len(TEXTS)))])

    def body(self, kind: type[Struct]) -> bytes:
        fields = {"op": kind.__struct_config__.tag, **self.value(kind)}
        if kind in (messages.RpcRequest, messages.RpcReply):
            rpc = self.random.choice(RPC_KINDS)
            payload = rpc.request if kind is messages.RpcRequest else self.random.choice((rpc.reply, None))
            fields |= {"kind": rpc.name, "payload": payload and self.value(payload)}
        return json.dumps(fields).encode()


def receive(body: bytes, kind: Any) -> Any:
    """The message in a body, as a node gets it."""
    return convert_payload(decode(body, [kind]))


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from leaves(getattr(value, name))
    elif isinstance(value, tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value


@pytest.mark.parametrize("kind", [*KINDS, *CONTROL_SOCKET], ids=lambda kind: kind.__name__)
def test_random_messages_are_accepted_or_refused(kind):
    maker, understood = Maker(1), 0
    for _ in range(400):
        if understood == 20:
            break
        try:
            message = receive(maker.body(kind), kind)
        except ProtocolError:
            continue
        understood += 1
        assert type(message) is kind
        assert receive(encode(message)[4:], kind) == message, "a message that was understood stays as it is"
        for leaf in leaves(message):
            if isinstance(leaf, str):
                assert escape_control_chars(leaf) == leaf
                assert len(leaf) <= MAX_TEXT_CHARS
            elif isinstance(leaf, int | float) and not isinstance(leaf, bool):
                assert math.isfinite(leaf)
                assert -64 <= leaf <= 1e11
        act_on(message)
    assert understood > 3


def act_on(message: messages.Message) -> None:
    """Make the texts that this machine shows of a message, and check that they are harmless."""
    if isinstance(message, messages.JoinStatus):
        assert escape_control_chars(message.describe()) == message.describe()
    verdict: FailureReport | None = None
    if isinstance(message, messages.EndJob):
        verdict = message.outcome.verdict
    if isinstance(message, messages.Restarting):
        verdict = message.verdict
    if verdict:
        json.dumps(verdict.to_json())
        for line in render_verdict(verdict, 2).splitlines()[1:]:
            assert line.startswith(("  ", "\x1b[2m  ")), "our own lines begin otherwise"


WRONG = [None, True, 7, 1.5, "text", [], ["text"], [["text"]], [7], [None], {}, {"a": 7}, [{"a": [7]}], 1 << 70]


def with_wrong_elements(value: Any) -> Iterator[Any]:
    """A message in JSON with one value of it, at any depth, replaced by one of another type, or put into a list."""
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict | list):
        inside = (*value.items(),) if isinstance(value, dict) else (*enumerate(value),)
    for key, each in inside:
        for wrong in (*WRONG, [each], [each, *WRONG], {"a": each}):
            copied = value.copy()
            copied[key] = wrong
            yield copied
        for wrong in with_wrong_elements(each):
            copied = value.copy()
            copied[key] = wrong
            yield copied


@pytest.mark.parametrize("kind", [*KINDS, *CONTROL_SOCKET, *HISTORY, *DOCTOR], ids=lambda kind: kind.__name__)
def test_elements_of_any_other_type_are_refused(kind):
    """Nothing but ProtocolError, which loses the node or skips the record."""
    maker = Maker(2)
    for _ in range(3):
        changed = [*itertools.islice(with_wrong_elements(json.loads(maker.body(kind))), 1000)]
        for fields in maker.random.sample(changed, min(len(changed), 60)):
            try:
                message = receive(json.dumps(fields).encode(), kind)
            except ProtocolError:
                continue
            assert type(message) is kind
            if kind is not messages.RanksInspected:  # which stays in its process; a record's is converted later
                assert list not in map(type, leaves(message))


@pytest.mark.parametrize("line", [["not text"], 7, None, {}])
def test_last_lines_are_text(line):
    with pytest.raises(ProtocolError):
        convert(["text", line], TailLines)


@pytest.mark.slow
def test_a_coordinator_accepts_any_message():
    """The machine acts or raises ProtocolError, which loses the node. The job always ends."""
    maker = Maker(0)
    for _ in range(200):
        job = joined(1, min_nodes=2, grace=1.0, max_restarts=2)
        for _ in range(20):
            kind = maker.random.choice(TO_NODE_ZERO)
            try:
                job.send(1, receive(maker.body(kind), kind))
            except ProtocolError:
                if maker.random.random() < 0.2:
                    job.lose(1, "it sent that")
            job.wait(maker.random.random())
        job.send(0, messages.StopRequested(2))
        job.drain(0, attempt=max(each.attempt for each in job.take(messages.StartAttempt, 0)))
        job.wait(200)
        assert job.take(messages.EndJob, 0)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("50%\r100%", "50%\\r100%"),
        ("\x1b[2J\0\x7f\x9b", "\\x1b[2J\\x00\\x7f\\x9b"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("naïve 日本\u3000ที่ 👩\u200d🔬", "naïve 日本\u3000ที่ 👩\u200d🔬"),
        ("\udc80", "\\udc80"),
    ],
)
def test_control_characters_are_escaped_once(text, plain):
    assert escape_control_chars(text) == plain
    assert escape_control_chars(plain) == plain


def test_of_many_last_lines_the_last_are_kept():
    assert convert([*map(str, range(99))], TailLines) == tuple(map(str, range(99 - MAX_TAIL_LINES, 99)))


def test_escaped_text_is_one_line():
    assert sanitize_line("a\nb") == "a\\nb"
    assert sanitize_line("x" * 500, limit=10) == "x" * 9 + "…"
    assert sanitize_line("Connection closed by peer", limit=16) == "Connection…"
    assert sanitize_line("Connection closed by peer", limit=18) == "Connection closed…"
    assert sanitize_line("a verylongword", limit=8) == "a veryl…"
    assert sanitize_text("x" * (2 * MAX_TEXT_CHARS)).count("\n") == 2
