"""The launcher itself: one job, its nodes, their ranks and their output.

* ``job/``: decisions about the whole job, made on node 0. Pure.
* ``node/``: one node's part: it starts, watches and stops processes.
* ``net/``: connections between the nodes of a job.
* ``rank/``: code inside the user's processes. Standard library only.
* ``output/``: what ranks print, on its way to the terminal and files.
* ``control_socket/``: how a running job answers other commands.

The vocabulary is in ``events.py``, ``messages.py``, ``failures.py``, ``job_config.py`` and ``node_config.py``. To
change a decision, read these, ``job/`` and ``node/``. ``feature.py`` has what features can add.
"""
