"""``ddplaunch manifest``: Kubernetes manifests (YAML) for jobs.

A file for each kind of object; no cluster is asked.
"""
