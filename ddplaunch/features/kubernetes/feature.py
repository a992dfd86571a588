"""Kubernetes: ``ddplaunch submit --scheduler kubernetes``."""

from __future__ import annotations

import os

from ddplaunch.core.feature import Feature, SchedulerEntry


def has_kubectl_context() -> bool:
    """Whether the user seems to have a context of kubectl, by files and variables alone; kubectl is not started."""
    files = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    return any(map(os.path.exists, files.split(os.pathsep))) or "KUBERNETES_SERVICE_HOST" in os.environ


class KubernetesJobs(Feature):
    requires = ("submit", "manifest", "code")
    schedulers = (
        SchedulerEntry(
            "kubernetes", "Kubernetes", "scheduler", "Kubernetes", command="command", may_find=has_kubectl_context
        ),
    )


FEATURE = KubernetesJobs()
