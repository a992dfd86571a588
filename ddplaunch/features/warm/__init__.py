"""Warm zygotes, which outlive a run and serve later ones: ``--warm`` and ``ddplaunch warm``.

``rank/`` is the warm zygote itself; the other files are the launcher's side: fingerprint, sockets, requests.
"""
