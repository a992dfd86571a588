"""Code that is loaded in the ranks and in the zygote: standard library only, so that user code finds no other modules.

``zygote`` forks the ranks; ``rank_runner`` runs the program in each. docs/fidelity.md has the rule: a program must not
notice ddplaunch. The launcher's side is in ``core/agent``.
"""
