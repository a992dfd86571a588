"""The launcher itself: one job, its nodes, their ranks and their output. In three floors, which import downward only.

Data: the modules beside this file, as ``events``, ``messages``, ``failures``, ``options`` and ``job_config``.

Decisions, pure:

* ``job/``: about the whole job, made on node 0.
* ``node/``: about the ranks of one node.

Effects:

* ``agent/``: starts, watches and stops the ranks of one node.
* ``net/``: connections between the nodes of a job.
* ``rank/``: code inside the user's processes. Standard library only.
* ``output/``: what ranks print, on its way to the terminal and files.
* ``control_socket/``: how a running job answers other commands.

To change a decision, read the data, ``job/`` and ``node/``. ``feature.py`` has what features can add.
"""
