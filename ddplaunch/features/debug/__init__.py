"""The debugger: ``--debug``, ``breakpoint()`` in ranks, and ``ddplaunch debug``.

``rank/`` runs in the rank; ``node`` plugs into the launcher, where ``debug_server`` connects ranks and users;
``command`` is a user's side.
docs/debugging.md is the reference. The core and other features need not be read.
"""
