"""The registry of features: those of ``features/__init__.py``, and the plug-ins of installed packages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeVar

from ddplaunch.base.entry_points import EntryPoint, find_entry_points
from ddplaunch.base.errors import LaunchError, sanitize_line
from ddplaunch.core.feature import Command, Feature, ReplacementLauncher, SchedulerEntry
from ddplaunch.system.schedulers.scheduler_registry import register_scheduler

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.core.agent.zygote_process import ZygoteSource
    from ddplaunch.core.messages import Message

PLUGIN_GROUP = "ddplaunch.features"
PLUGINS_VARIABLE = "DDPLAUNCH_PLUGINS"  # "0" leaves all plug-ins out

M = TypeVar("M", bound="Message")
T = TypeVar("T")


class FeatureRegistry:
    """The features in the order of the list, then the plug-ins; a feature that requires a missing one is left out."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        """``modules``: for each feature's name, its module, or its package, which has a module ``feature``."""
        self._features: dict[str, Feature] = {}
        self._packages: dict[str, str] = {}  # by feature: its package and a dot
        self.plugins: list[str] = []
        self.left_out: list[str] = []
        """Messages: plug-ins that cannot be used, and why."""
        for name, path in modules.items():
            module = import_module(path)
            if not hasattr(module, "FEATURE"):
                module = import_module(f"{path}.feature")
            if all(other in self._features for other in module.FEATURE.requires):
                self._add(name, module.FEATURE, f"{module.__package__}.")

    def _add(self, name: str, feature: Feature, package: str) -> None:
        self._features[name], self._packages[name] = feature, package
        for entry in feature.schedulers:
            command = entry.command and package + entry.command
            register_scheduler(entry.name, entry.title, package + entry.module, entry.kind, command, entry.may_find)

    def add_plugin(self, entry: EntryPoint) -> None:
        """Add the feature of an installed package; if that is not possible, leave it out, with a message."""
        name = f"{entry.name} ({entry.distribution})"
        try:
            module = import_module(entry.module)
            feature = getattr(module, entry.attribute or "FEATURE")
            if not isinstance(feature, Feature):
                raise TypeError(f"{entry.module}:{entry.attribute or 'FEATURE'} is not a Feature")
            if missing := [other for other in feature.requires if other not in self._features]:
                raise LookupError(f"it requires the feature {missing[0]}")
            known, commands = {entry.name for entry in self._schedulers()}, self.commands()
            if taken := [each.name for each in feature.commands if each.name in commands]:
                raise ValueError(f"there is a command {taken[0]}")
            if taken := [each.name for each in feature.schedulers if each.name in known]:
                raise ValueError(f"there is a scheduler {taken[0]}")
            self._add(name, feature, f"{module.__package__}." if module.__package__ else "")
            self.plugins.append(name)
        except (Exception, SystemExit) as error:
            self.leave_out(name, error)

    def leave_out(self, name: str, why: BaseException) -> None:
        """Remove a plug-in that has raised, and record a message for the user."""
        if self._features.pop(name, None):
            self.plugins.remove(name)
        self.left_out.append(f"the plug-in {name} is left out: {type(why).__name__}: {sanitize_line(str(why), 300)}")

    def call(self, name: str, hook: Callable[..., T], *arguments: object, **more: object) -> T | None:
        """Call a hook of a feature; if a plug-in raises anything but an error of the user, leave the plug-in out."""
        try:
            result = hook(*arguments, **more)
            return [*result] if isinstance(result, Iterator) else result  # type: ignore[return-value]
        except LaunchError:
            raise
        except Exception as error:
            if name not in self.plugins:
                raise
            self.leave_out(name, error)
        return None

    def _schedulers(self) -> Iterator[SchedulerEntry]:
        return (entry for _, feature in self for entry in feature.schedulers)

    def __iter__(self) -> Iterator[tuple[str, Feature]]:
        return iter([*self._features.items()])

    def rewrite_words(self, words: list[str], known: Mapping[str, bool]) -> list[str]:
        """Return the words of a command line, rewritten by all features with ``Feature.rewrite_words``."""
        for _, feature in self:
            words = feature.rewrite_words(words, known)
        return words

    def run_instead(self, options: Options) -> ReplacementLauncher | None:
        """Return what runs the job in place of this launcher; None if it runs the job itself."""
        return next(filter(None, (self.call(name, feature.run_instead, options) for name, feature in self)), None)

    def make_zygote_source(self, options: Options) -> ZygoteSource | None:
        """Return what provides the zygotes of this node; None if no feature does."""
        sources = (self.call(name, feature.make_zygote_source, options) for name, feature in self)
        return next(filter(None, sources), None)

    def commands(self) -> dict[str, Command]:
        """Return all commands by name, with the full names of their modules."""
        return {
            command.name: command._replace(module=self._packages[name] + command.module)
            for name, feature in self
            for command in feature.commands
        }

    def message_types(self, base: type[M]) -> list[type[M]]:
        """List the types of messages, of the core and of the features; ``base``: FromNode or FromNodeZero."""
        list(self.modules("messages"))  # the import of a module defines its messages
        return base.__subclasses__()

    def modules(self, attribute: Literal["requests", "rpc_kinds", "messages", "locators"]) -> Iterator[ModuleType]:
        """Import and yield the modules that features name in this attribute."""
        for name, feature in self:
            for module in getattr(feature, attribute):
                if imported := self.call(name, import_module, self._packages[name] + module):
                    yield imported


@cache
def load_features() -> FeatureRegistry:
    """Import the features that ``features/__init__.py`` lists, and then those of installed packages.

    No import statement names ``ddplaunch.features``, as that package is above the core.
    """
    listed = import_module("ddplaunch.features")
    registry = FeatureRegistry({**listed.OBSERVE, **{name: f"ddplaunch.features.{name}" for name in listed.FEATURES}})
    for entry in find_entry_points(PLUGIN_GROUP) if os.environ.get(PLUGINS_VARIABLE) != "0" else ():
        registry.add_plugin(entry)
    return registry
