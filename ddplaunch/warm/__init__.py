"""Warm zygotes, which outlive a run and serve later ones: the launcher's side (fingerprint, sockets, requests)."""
