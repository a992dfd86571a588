"""``ddplaunch manifest``: Kubernetes manifests (YAML) for jobs.

A file for each kind of object; no cluster is asked. The launcher need not be read.
"""
