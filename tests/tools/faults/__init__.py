"""The fault matrix: real jobs on two virtual hosts, and all that happens to jobs, as rows of a table.

``matrix`` is the table, made of ``actions``; ``trial`` runs one row under a ``launcher``.
"""
