"""``--metrics``: a file of figures for Prometheus."""
