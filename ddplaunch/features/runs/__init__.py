"""``ps``, ``logs``, ``stop``, ``wait``, ``attach``, ``report``, ``rerun`` and ``clean``, and what writes the history.

Each command has a file. ``history_recorder`` writes the events of a run, from which ``observe/history`` builds its
record; ``goodput`` describes how its time was spent. ``provenance`` is what a run was: commit, changes, versions;
``provenance_probe`` is the process that writes it, while the ranks run. ``run_comparison`` compares runs,
``comparison_report`` prints that. ``rerun`` runs a command again.
"""
