"""Coordination of the nodes of a job: joining, the coordinator on node 0, control messages, restarts, time limits.

``coordinator`` decides, for one attempt with ``job_attempt``; it gets messages and returns messages, so a change can be
tested without processes. The network (``core/net``) and features need not be read: their parts are ``JobSide``.
"""

MIN_HEARTBEAT_TIMEOUT_S = 2.0  # with less, a busy machine would count as lost
