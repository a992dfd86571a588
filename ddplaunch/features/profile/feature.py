"""Profiles: ``ddplaunch profile``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Profile(Feature):
    requires = ("inspect",)
    commands = (Command("profile", "Profile the ranks of a running job."),)
    requests = ("request",)
    rpc_kinds = ("rpc",)


FEATURE = Profile()
