"""Tests that our dataclasses behave as those of the standard library."""

import copy
import dataclasses
import pickle
from functools import cached_property

import msgspec
import pytest

from ddplaunch.base import fast_dataclass as ours


def made(module):
    """The same classes, made by either module."""

    class Point:
        """A place."""

        x: int
        y: int = 2
        names: tuple[str, ...] = ()

        @cached_property
        def sum(self):
            return self.x + self.y

        def __post_init__(self):
            if self.x < 0:
                raise ValueError("too small")

    class Growing:
        items: list = module.field(default_factory=list)
        name: str = ""

    class Named:
        name: str

        def __repr__(self):
            return f"<{self.name}>"

    return module.dataclass(frozen=True)(Point), module.dataclass(Growing), module.dataclass(frozen=True)(Named)


def assign(instance, name):
    setattr(instance, name, 1)
    return vars(instance)


def matched(value):
    match value:
        case object(x=x, y=y, names=names):
            return x, y, names
        case object(items=items):
            return items


def positional(cls, value):
    match value:
        case cls(first, second):
            return first, second


THINGS = {
    "by position": lambda p, g, n: p(1, 3, ("a",)),
    "by name": lambda p, g, n: p(y=1, x=2),
    "the defaults": lambda p, g, n: p(1),
    "one value missing": lambda p, g, n: p(),
    "one value missing beside one that nobody knows": lambda p, g, n: p(z=1),
    "one value too many": lambda p, g, n: p(1, 2, (), 3),
    "a name that nobody knows": lambda p, g, n: p(1, z=1),
    "a value twice": lambda p, g, n: p(1, x=1),
    "refused afterwards": lambda p, g, n: p(-1),
    "set": lambda p, g, n: assign(p(1), "x"),
    "set anew": lambda p, g, n: assign(p(1), "other"),
    "deleted": lambda p, g, n: delattr(p(1), "x"),
    "set where that is allowed": lambda p, g, n: assign(g(), "name"),
    "cached": lambda p, g, n: [(point := p(1)).sum, point.sum, point],
    "alike": lambda p, g, n: [p(1) == p(1), p(1) != p(1), p(1) == p(2), p(1) == n("a"), g() == g(), p(1) == 1],
    "a cached value makes no difference": lambda p, g, n: [(point := p(1)).sum, point == p(1)],
    "in a set": lambda p, g, n: len({p(1), p(1), p(2)}),
    "not in a set": lambda p, g, n: {g()},
    "a new list each": lambda p, g, n: [(one := g()).items.append(1), one, g()],
    "a list of its own": lambda p, g, n: g([1, 2]),
    "a default of the class": lambda p, g, n: [p.y, hasattr(g, "items"), p.__doc__],
    "shown": lambda p, g, n: [repr(n("a")), repr(p(1)).partition(".Point")[2]],
    "replaced": lambda p, g, n: [REPLACE[p.__module__](p(1), y=4), REPLACE[p.__module__](g(), items=[1])],
    "replaced by a name that nobody knows": lambda p, g, n: REPLACE[p.__module__](p(1), z=4),
    "replaced by the standard library": lambda p, g, n: dataclasses.replace(p(1), y=4),
    "replaced and refused": lambda p, g, n: REPLACE[p.__module__](p(1), x=-1),
    "as a dict": lambda p, g, n: [dataclasses.asdict(p(1)), dataclasses.asdict(g([1]))],
    "its fields": lambda p, g, n: [
        (each.name, each.type, each.default is dataclasses.MISSING, each.default_factory is dataclasses.MISSING)
        for kind in (p, g, p(1), n)
        for each in dataclasses.fields(kind)
    ],
    "is one": lambda p, g, n: [dataclasses.is_dataclass(p), dataclasses.is_dataclass(g()), dataclasses.is_dataclass(1)],
    "matched": lambda p, g, n: [matched(p(1)), matched(g())],
    "matched by position": lambda p, g, n: [positional(p, p(1)), positional(g, g())],
    "copied": lambda p, g, n: [copy.copy(p(1)), copy.deepcopy(g([1]))],
    "as JSON": lambda p, g, n: msgspec.json.encode([p(1), g([1])]),
    "from JSON": lambda p, g, n: [msgspec.convert({"x": 5}, p), msgspec.convert({}, g)],
    "from JSON that lacks a value": lambda p, g, n: msgspec.convert({"y": 5}, p),
}
"""What is done with them."""

REPLACE: dict = {}


def outcome(thing, classes):
    def plain(value):
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return {"__": type(value).__name__, **vars(value)} if dataclasses.is_dataclass(value) else value

    try:
        return plain(thing(*classes))
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("what", THINGS)
def test_ours_behave_as_those_of_the_standard_library(what, monkeypatch):
    outcomes = []
    for module in (ours, dataclasses):
        monkeypatch.setitem(REPLACE, __name__, module.replace)
        outcomes.append(outcome(THINGS[what], made(module)))
    assert outcomes[0] == outcomes[1]


@ours.dataclass(frozen=True)
class Sent:
    number: int
    more: tuple[int, ...] = ()


def test_one_can_be_pickled():
    assert pickle.loads(pickle.dumps(Sent(1, (2,)))) == Sent(1, (2,))
