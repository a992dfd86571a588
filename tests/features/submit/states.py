"""What tests of several batch schedulers share: messages, and short intervals between their questions."""

from tests.fork_server import CONSTANTS

HELD = "waits, and is on hold"
DELETED = "was deleted before it began (exit code 143)"
KILLED = "was killed before it began (exit code 143)"
OUT_OF_MEMORY = "used more memory than it had (exit code 137)"
REJECTED = "rejected the job (exit code"

_FOLLOWER = "system.schedulers.log_follower"
SHORT_INTERVALS = {
    CONSTANTS: f"{_FOLLOWER}.LOG_POLL_INTERVAL_S=0.05 {_FOLLOWER}.MIN_QUERY_INTERVAL_S=0.1 "
    "features.runs.stop.POLL_INTERVAL_S=0.1"
}
"""Variables of ``submit --follow``, ``attach`` and ``stop`` in a fork."""
