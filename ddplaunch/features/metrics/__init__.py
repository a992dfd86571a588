"""``--metrics``: a file of figures for Prometheus.

A figure is a line of ``prometheus_file``. How samples are taken need not be read.
"""
