"""``ddplaunch manifest``: Kubernetes manifests (YAML) for jobs.

``kubernetes`` and ``kubeflow_jobs`` build the objects, ``pod_spec`` the pods. No cluster is contacted.
"""
