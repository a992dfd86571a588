"""What only a real NVIDIA GPU can show: some forty checks in two parts of at most four minutes.

    python -m tests.gpu_check 1                 # start, end, fidelity: on a GPU; else simulated
    python -m tests.gpu_check 2                 # explained, seen, README's tests
    python -m tests.gpu_check --table 1.json 2.json   # the table of docs/performance.md

Without a GPU the same checks run with ``tests/fake_nvml.c`` and on the CPU, up to where CUDA itself begins, and say
what is left. Each check is a function with ``@check``, in the file of its group.
"""
