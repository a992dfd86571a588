"""Reservations of this machine's GPUs, CPUs and places for runs: ``--gpus free:2``, ``--jobs`` and ``--wait``.

``lock_folder`` chooses a folder that all users share, ``claims`` are the files in it, one for each launcher that has
or waits for something. ``waiting`` reserves in order of arrival; the next in line has an ``early_zygote``.
``free_gpus`` says which GPUs are free, and ``gpu_choice`` chooses among them.
"""
