"""``ddplaunch devices``: the GPUs and CPUs of this machine, and which are used.

It shows what ``system/devices`` reads.
"""
