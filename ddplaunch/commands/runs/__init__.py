"""Runs and jobs that were started: which there are, what they print, how they end, what is kept of them."""
