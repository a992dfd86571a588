"""``--checkpoint``: which checkpoint a run has saved last, for goodput and the report.

``node.py`` finds it at the end of an attempt.
"""
