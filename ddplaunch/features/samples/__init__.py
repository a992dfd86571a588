"""Samples over time: CPU, memory, GPU and collectives of each rank, for the report, the live view and metrics."""
