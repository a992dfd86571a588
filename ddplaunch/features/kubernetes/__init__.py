"""Kubernetes as a batch scheduler: ``ddplaunch submit --scheduler kubernetes``, and the commands for such jobs.

The feature ``manifest`` builds the objects. ``kubectl`` calls the program kubectl, which has the user's login to the
API server. ``objects`` defines the objects that are read, ``job_state`` derives a job's state from them, and
``scheduler`` offers both to the commands. ``pod_logs`` reads the output of a job from its pods. ``command`` and
``submission`` create jobs.
"""
