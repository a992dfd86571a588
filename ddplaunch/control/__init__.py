"""The nodes of one job, joined: who is there, whether they agree, what they do next together."""

MIN_HEARTBEAT_TIMEOUT_S = 2.0  # seconds below which a busy machine would be taken for a dead one
