"""Fast replacement for ``dataclasses``, without importing ``inspect`` and compiling code for each class.

Classes are declared in the same way, and ``asdict``, ``fields`` and msgspec work. Only ``frozen`` and
``default_factory`` are supported, and fields are not inherited.
"""

from __future__ import annotations

import dataclasses
from dataclasses import FrozenInstanceError

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:

    class field:
        """A default value that is created for each object."""

        def __init__(self, *, default_factory):
            self.make = default_factory

    def dataclass(cls=None, *, frozen=False):
        """Class decorator, as ``dataclasses.dataclass``."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen)
        own = vars(cls)
        names = tuple(cls.__annotations__)
        defaults = {name: own[name] for name in names if name in own}
        for name, default in defaults.items():
            if isinstance(default, field):
                delattr(cls, name)
        cls.__match_args__ = names
        cls.__dataclass_fields__ = _Fields(cls, defaults)
        cls.__init__ = _init(cls, names, defaults)
        cls.__eq__, cls.__hash__ = _eq, _hash if frozen else None
        if "__repr__" not in own:
            cls.__repr__ = _repr
        if frozen:
            cls.__setattr__, cls.__delattr__ = _refuse_to_set, _refuse_to_delete
        return cls

    def replace(instance, /, **changes):
        """Copy an object with changes, as ``dataclasses.replace`` does."""
        return type(instance)(**{name: getattr(instance, name) for name in instance.__match_args__} | changes)

    def _init(cls, names, defaults):
        known, finish = frozenset(names), getattr(cls, "__post_init__", None)
        factories = {name: default.make for name, default in defaults.items() if isinstance(default, field)}
        values = {name: default for name, default in defaults.items() if name not in factories}

        def __init__(self, *args, **named):
            given = {**values, **dict(zip(names, args)), **named}  # noqa: B905
            for name, make in factories.items():
                if name not in given:
                    given[name] = make()
            if given.keys() != known or len(args) > len(names) or not named.keys().isdisjoint(names[: len(args)]):
                what = ", ".join((*map(repr, args), *named))
                raise TypeError(f"{cls.__qualname__}({', '.join(names)}) was called with ({what})")
            self.__dict__.update(given)
            if finish:
                finish(self)

        return __init__

    class _Fields:
        """Lazy ``__dataclass_fields__``: on first access the standard library builds them for a twin class."""

        def __init__(self, cls, defaults):
            self._cls, self._defaults = cls, defaults

        def __get__(self, instance, owner):

            cls = self._cls
            body = {
                name: dataclasses.field(default_factory=default.make) if isinstance(default, field) else default
                for name, default in self._defaults.items()
            }
            body |= {"__module__": cls.__module__, "__doc__": "", "__annotations__": cls.__annotations__}
            twin = dataclasses.dataclass(init=False, repr=False, eq=False)(type(cls.__name__, (), body))
            cls.__dataclass_params__, cls.__dataclass_fields__ = twin.__dataclass_params__, twin.__dataclass_fields__
            return twin.__dataclass_fields__

    def _values(instance):
        return tuple([getattr(instance, name) for name in instance.__match_args__])

    def _eq(self, other):
        return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented

    def _hash(self):
        return hash(_values(self))

    def _repr(self):
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
        return f"{type(self).__qualname__}({values})"

    def _refuse_to_set(self, name, value):

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_to_delete(self, name):

        raise FrozenInstanceError(f"cannot delete field {name!r}")
