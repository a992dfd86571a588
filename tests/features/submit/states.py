"""Messages that several batch schedulers share, each written once for their tests."""

HELD = "waits, and is on hold"
DELETED = "was deleted before it began (exit code 143)"
KILLED = "was killed before it began (exit code 143)"
OUT_OF_MEMORY = "used more memory than it had (exit code 137)"
REJECTED = "rejected the job (exit code"
