"""Code that is loaded in the ranks and in the zygote: standard library only, so that user code meets nothing else.

``zygote`` forks the ranks; ``rank_runner`` becomes one and runs the program. docs/fidelity.md is the rule: a program
must not notice. The launcher's side is in ``core/node``.
"""
