"""Kubernetes: ``ddplaunch submit --scheduler kubernetes``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, SchedulerEntry


class KubernetesJobs(Feature):
    requires = ("submit", "manifest")
    schedulers = (
        SchedulerEntry("kubernetes", "Kubernetes", "scheduler", "Kubernetes", command="command", finds_jobs=True),
    )


FEATURE = KubernetesJobs()
