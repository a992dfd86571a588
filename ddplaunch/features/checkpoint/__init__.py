"""``--checkpoint``: which checkpoint a run has saved last, for goodput and the report.

``node.py`` finds it at the end of an attempt. Goodput and report need not be read: they get an event.
"""
