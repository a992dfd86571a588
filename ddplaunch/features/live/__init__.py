"""The live view of a job, in the job's terminal (``run --ui``) or in another one (``ddplaunch top``).

``view_state`` has the data that is shown (pure), ``frame`` renders it, ``live_view`` handles the keys. Each column of
the table of ranks is a line of ``COLUMNS`` in ``rank_table``. The data comes from a reply that ``observe/request.py``
defines.
"""
