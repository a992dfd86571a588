"""Kubernetes as a batch scheduler: ``ddplaunch submit --scheduler kubernetes``, and all commands on such jobs.

``manifest`` builds the objects. ``kubectl`` reaches the API server, as the user is logged in there: ``kubectl``.
``objects`` is what is read, ``job_state`` decides what it means, ``scheduler`` is what the commands use. Their output
comes from the pods: ``pod_logs``. ``command`` and ``submission`` create jobs.
"""
