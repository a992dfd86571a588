"""Batch jobs as their scheduler shows them: finding one by its number, state, log, and job steps on its nodes."""
