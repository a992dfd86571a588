"""Kubernetes for tests: an API server whose pods are processes of this machine, reached by the real kubectl."""
