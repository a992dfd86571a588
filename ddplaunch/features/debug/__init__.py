"""The debugger: ``--debug``, ``breakpoint()`` in ranks, and ``ddplaunch debug``.

- ``rank/`` stops the rank: pdb gets lines from the launcher, ipdb and the like a terminal (``rank_terminal``).
- ``node`` is the debugger's part in the launcher. ``debug_server`` knows which ranks have stopped and who debugs them.
- ``debugger_prompt`` is one user's prompt. It runs in the launcher, and shows its text at one of ``user_terminals``.
- ``request`` attaches a client, and ``client`` is that client: it sends keys or piped text, and shows bytes.
- ``command`` finds the job, or connects to another node and runs the command there. ``messages`` has all messages.

docs/debugging.md is the reference.
"""
