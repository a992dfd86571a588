"""``ddplaunch manifest``: a job for Kubernetes as YAML."""
