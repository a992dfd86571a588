"""Samples over time: CPU, memory, GPU and collectives of each rank, for the report, the live view and metrics.

``node.py`` takes a sample at each interval, ``sample.py`` has its type. Who uses samples need not be read.
"""
