"""``--metrics``: a file of metrics for Prometheus.

``prometheus_file`` defines the metrics; their values come from the samples of ``observe/samples``.
"""
