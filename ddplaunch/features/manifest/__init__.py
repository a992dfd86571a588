"""``ddplaunch manifest``: Kubernetes manifests (YAML) for jobs."""
