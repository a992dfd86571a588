"""``--metrics``: a file of metrics for Prometheus.

A figure is a line of ``prometheus_file``, from a sample of ``observe/samples``.
"""
