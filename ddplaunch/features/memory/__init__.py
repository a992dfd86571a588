"""Out of memory: samples of the ranks' memory, an alarm, and the report on a rank that was killed for it.

``node.py`` explains the end of a rank, ``memory_report`` has the sentences (pure), ``rank/`` writes the state of CUDA's
allocator.
"""
