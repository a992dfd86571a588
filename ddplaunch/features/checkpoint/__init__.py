"""``--checkpoint``: which checkpoint a run has saved last, for goodput and the report."""
