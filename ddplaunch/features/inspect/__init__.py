"""Inspection: what each rank does and waits for. ``ddplaunch stacks``, stalls, stragglers, the cause of a failure.

``rank/`` reads the state of torch in a rank, ``node/`` collects stacks and counters on a node, ``job/`` acts on node 0,
``diagnosis/`` draws conclusions (pure), ``stacks_text`` and ``command`` show them. Live view, profile and debugger use
its data.
"""
