"""The command ``ddplaunch stacks``: what each rank of a running job does, and which ranks wait for which.

The data comes from ``observe``.
"""
