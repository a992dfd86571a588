"""The plan of a job: global ranks, addresses, variables and CPUs of every rank, computed before any process starts.

``planner`` computes a ``plan.Plan`` from a ``PlanSpec``. Pure: how options, clusters and devices come to the spec,
and what the launcher does with the plan, need not be read.
"""
