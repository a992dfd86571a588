"""The plan of a job: global ranks, addresses, variables and CPUs of every rank, computed before any process starts.

``planner`` computes a ``plan.Plan`` from a ``PlanSpec``, as a pure function.
"""
