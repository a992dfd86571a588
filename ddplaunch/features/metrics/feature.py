"""Metrics for Prometheus: ``--metrics``."""

from __future__ import annotations

from ddplaunch.core.feature import Feature, FeatureContext, NodeSide
from ddplaunch.features.metrics.options import MetricsFile


class Metrics(Feature):
    requires = ("samples",)
    options = (MetricsFile,)

    def make_node_side(self, context: FeatureContext) -> NodeSide | None:
        if not context.config.metrics:
            return None
        from ddplaunch.features.metrics.prometheus_file import PrometheusFile
        from ddplaunch.features.samples.node import SAMPLE_INTERVAL_S, SampleCollector

        file = PrometheusFile(context.config.metrics, context.job.status, context.screen.show_note)
        if samples := context.find(SampleCollector):
            samples.subscribe(context.loop.guard(file.on_sample), late_interval_s=SAMPLE_INTERVAL_S)
        return file


FEATURE = Metrics()
