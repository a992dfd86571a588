"""Handing a job to a scheduler: batch scripts, manifests, and following a job."""
