"""``ddplaunch submit``: batch scripts for Slurm, Grid Engine, PBS and LSF, and submitting them.

``batch_command`` is what the command line of ``manifest`` has in common with it. A new scheduler is a file with a
``BatchScheduler`` and its line in ``feature.py``.
"""
