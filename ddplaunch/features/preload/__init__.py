"""Preloading: which modules the zygote imports once, before it forks the ranks.

``import_selector`` reads the user's program and decides; ``known.json`` lists the audited packages; ``rank/`` guards
the imports in the zygote and repairs what a fork inherits. Why it is safe: docs/how-it-works.md. How the zygote forks
need not be read.
"""
