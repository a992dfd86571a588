"""Checks and binds the arguments of a function that ``launch`` or ``Session.run`` calls in the ranks.

As in ``ddplaunch run file.py:function``, ddplaunch fills in ``rank``, ``world_size``, ``device`` and the other names of
``INJECTED_PARAMETERS``; positional arguments fill the remaining parameters, in order. A library's function gets these
values only if it cannot be called without them: ``numpy.ones`` has a ``device`` of its own.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ddplaunch.base.errors import UsageError, sanitize_line
from ddplaunch.base.text import join_names
from ddplaunch.system.target import signature
from ddplaunch.system.target.arguments import injected_value
from ddplaunch.system.target.signature import ArgumentValues, Parameter

_SITE_DIR_NAMES = frozenset({"site-packages", "dist-packages"})  # of the folders in which packages are installed


def check_call(function: object, args: tuple[object, ...]) -> None:
    """Check that ``function`` can be called with ``args`` in a rank.

    Raises UsageError if it is not callable, is a coroutine function, or does not accept ``args``.
    """
    if not callable(function):
        raise UsageError(f"expected a function, not {type(function).__name__} {sanitize_line(repr(function), 60)}")
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"{name} is a coroutine function", "wrap it in a function that calls asyncio.run")
    inner: object = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    try:
        filled = _injected_parameters(function, args)
        _bind(function, args, filled)
    except ValueError:  # a C function without a signature
        return
    except TypeError as error:
        if hasattr(inner, "__wrapped__"):  # the decorator may add arguments
            return
        takes = f"{name}{_signature(function)}"
        hint = f"{takes}; ddplaunch fills in {join_names(list(filled))}" if filled else takes
        raise UsageError(f"{name}(): {error}", sanitize_line(hint)) from None


def bind_call(
    function: Callable[..., object],
    args: tuple[object, ...],
    values: ArgumentValues,
    make_device: Callable[[str], object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return arguments for ``function``, by position and by name: ``args``, and ``values`` for parameters so named."""
    try:
        filled = _injected_parameters(function, args)
        if not filled:
            return args, {}
        bound = _bind(function, args, filled)
    except (TypeError, ValueError):  # see check_call
        return args, {}
    for name, parameter in filled.items():
        bound.arguments[name] = injected_value(parameter, values, make_device)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _injected_parameters(function: Callable[..., object], args: tuple[object, ...]) -> dict[str, Parameter]:
    """The parameters that ddplaunch fills in, by name, without those that a ``functools.partial`` has set."""
    preset: set[str] = set()
    inner: object = function
    while isinstance(inner, functools.partial):
        preset |= inner.keywords.keys()
        inner = inner.func
    if _is_library_function(inner):
        with suppress(TypeError):
            inspect.signature(function).bind(*args)
            return {}
    parameters = signature.from_function("", function).parameters
    return {each.name: each for each in parameters if each.injected and each.name not in preset}


def _is_library_function(function: object) -> bool:
    """Whether the module of a function is built in, of the standard library, or in a site-packages folder."""
    name = getattr(function, "__module__", None) or "builtins"
    module = sys.modules.get(name)
    if name == "__main__" or module is None:  # pickled by value
        return False
    path = getattr(module, "__file__", None)
    if path is None:
        return name in sys.builtin_module_names
    is_stdlib = path.startswith(sysconfig.get_path("stdlib") + os.sep)
    return is_stdlib or not _SITE_DIR_NAMES.isdisjoint(path.split(os.sep))


def _bind(function: Callable[..., object], args: tuple[object, ...], filled: Mapping[str, Parameter]) -> Any:
    """Bind ``args`` to the parameters that are not in ``filled``; raises TypeError if they do not fit."""
    own = _signature(function)
    rest = own.replace(parameters=[each for each in own.parameters.values() if each.name not in filled])
    bound = own.bind_partial()
    bound.arguments.update(rest.bind(*args).arguments)
    return bound


def _signature(function: Callable[..., object]) -> inspect.Signature:
    """The signature without the return annotation, which is irrelevant in an error message."""
    return inspect.signature(function).replace(return_annotation=inspect.Signature.empty)
