"""What one node does in a job: decides how it starts, watches, stops and explains the ranks on this machine. Pure.

Read ``machine`` first: it begins with its rules. ``node_events`` and ``commands`` are its input and output,
``attempt_machine`` is its part for one attempt, ``node_attempt`` what it knows of that, ``signals`` what it does with
signals. ``core/agent`` executes the commands.

Decisions about the whole job are in ``core/job``, the zygote's own side in ``core/rank``.
"""
