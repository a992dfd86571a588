"""Coordination of the nodes of a job: joining, the coordinator on node 0, control messages, restarts, time limits."""

MIN_HEARTBEAT_TIMEOUT_S = 2.0  # with less, a busy machine would count as lost
