"""The fault matrix: real jobs on two virtual hosts, and all that happens to jobs, as rows of a table.

``rows`` says what a row is; ``rank_rows``, ``launcher_rows``, ``network_rows`` and ``join_rows`` have them, ``trial``
runs one of them under a ``launcher``, and ``python -m tests.faults`` prints the results.
"""
