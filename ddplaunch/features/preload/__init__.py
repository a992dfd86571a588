"""Preloading: which modules the zygote imports once, before it forks the ranks.

``import_selector`` reads the user's program and decides. ``known.json`` lists the audited packages; to add one, run
``python -m tests.tools.preload_audit NAME --write`` with an interpreter that has it. ``rank/`` guards the imports in
the zygote; libraries that read a rank's variables at their import are in ``rank/fork_fixups.py``, differences that no
program notices in ``tests/tools/preload_audit/allowed_differences.py``. Why it is safe:
docs/how-it-works.md.
"""
