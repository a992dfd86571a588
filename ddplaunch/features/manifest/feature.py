"""Kubernetes: ``ddplaunch manifest``."""

from __future__ import annotations

from ddplaunch.core.feature import Command, Feature


class Manifest(Feature):
    requires = ("submit", "code")
    commands = (
        Command("manifest", "Print a training job as YAML for Kubernetes.", heading="Clusters", in_config=True),
    )


FEATURE = Manifest()
