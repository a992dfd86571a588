"""Collects the evidence about a stalled job: dumps of flight recorders, stacks, and the answer of NCCL's RAS service.

``node.py`` decides when they are collected, ``stall_files.py`` writes them into the folder of the run.
``ras_client.py`` asks the RAS service, ``ras_report.py`` reads its reply and compares it with our own inspection.
"""
