"""The live view of a job, in its own terminal (``run --ui``) or in another (``ddplaunch top``).

``view_state`` is what is shown (pure), ``frame`` and ``rank_table`` draw it, ``live_view`` reads the keys. How ranks
are inspected and sampled need not be read: the data comes from a reply of ``features/inspect/request.py``.
"""
