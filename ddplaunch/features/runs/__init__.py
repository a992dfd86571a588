"""Runs and batch jobs: ``ps``, ``logs``, ``stop``, ``wait``, ``attach``, ``report``, ``clean``, and the history."""
