"""``ddplaunch devices``: the GPUs, processors and NUMA nodes of this machine."""
