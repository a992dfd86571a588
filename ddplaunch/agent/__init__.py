"""One node's share of a job: starting, watching, stopping and explaining its ranks."""
