"""Writes the keyword arguments of ``ddplaunch.launch`` for type checkers: the options of ``run`` as a TypedDict."""

from collections.abc import Iterator
from types import NoneType
from typing import get_args

from ddplaunch.base.options import Option, declared_options
from ddplaunch.cli.run_options import GROUPS
from ddplaunch.features.python.launched_job import UNSUPPORTED_KEYWORDS
from tests.reference.page import PACKAGE

FILE = PACKAGE / "features" / "python" / "keywords.py"

HEAD = '''\
"""The keyword arguments of ``launch`` and ``Session``, for type checkers: the options of ``ddplaunch run``.

``python -m tests.reference`` writes this file. Values are as on the command line: ``timeout="10m"`` or 600,
``nproc=4`` or "auto".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

Text = str | int | float
Texts = str | Sequence[str]
Variables = Mapping[str, str] | Texts


class Keywords(TypedDict, total=False):
    """The options of ``ddplaunch run``, except those about a terminal or the target."""

'''


def render_keywords() -> str:
    return HEAD + "".join(f"    {name}: {text}\n" for name, text in _fields())


def _fields() -> Iterator[tuple[str, str]]:
    for group in GROUPS:
        for option in declared_options(group):
            if not option.is_argument and option.name not in UNSUPPORTED_KEYWORDS:
                kinds = get_args(get_args(group.__annotations__[option.name])[0])
                yield option.name, _type_of(option) + " | None" * (NoneType in kinds and not option.multiple)


def _type_of(option: Option) -> str:
    if option.is_flag:
        return "bool"
    if option.multiple:
        return "Variables" if option.name == "env" else "Texts"
    return "str" if option.choices else "Text"
