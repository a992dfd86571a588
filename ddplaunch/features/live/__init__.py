"""The live view of a job, in its own terminal (``run --ui``) or in another (``ddplaunch top``).

``view_state`` is what is shown (pure), ``frame`` draws it, ``live_view`` reads the keys; a column is a line of
``COLUMNS`` in ``rank_table``. The data comes from a reply of ``observe/request.py``.
"""
