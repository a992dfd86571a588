"""Metrics for Prometheus: ``--metrics``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.metrics.options import MetricsFile, check_folder

if TYPE_CHECKING:
    from ddplaunch.base.options import Options
    from ddplaunch.system.plan.plan import Plan


class Metrics(Feature):
    options = (MetricsFile,)

    def check(self, options: Options, plan: Plan) -> tuple[str, ...]:
        if (path := options[MetricsFile].metrics) is not None:
            check_folder(path)
        return ()

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        path = context.options[MetricsFile].metrics
        if path is None:
            return None
        from ddplaunch.features.metrics.prometheus_file import PrometheusFile
        from ddplaunch.observe.samples.node import SAMPLE_INTERVAL_S, SampleCollector

        file = PrometheusFile(os.path.abspath(path), context.job.status, context.screen.show_note)
        if samples := context.find(SampleCollector):
            samples.subscribe(context.loop.guard(file.on_sample), late_interval_s=SAMPLE_INTERVAL_S)
        return file


FEATURE = Metrics()
