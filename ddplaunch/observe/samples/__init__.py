"""Samples over time: CPU, memory, GPU and collectives of each rank, for the report, the live view and metrics.

``node.py`` takes a sample at each interval; a new value is a field of ``sample.py``, drawn by ``charts`` of
``features/runs/html_report``.
"""
