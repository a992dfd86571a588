"""Jobs over SSH: one SSH session for each host, the fleet of all sessions, and the program on each host.

``ssh_launch`` runs in place of a launcher here; ``remote_launcher`` starts one on each host, as ``ddplaunch run`` does.
The doctor and the debugger run commands on hosts through
``SshConnector`` in ``ssh_command.py``, a ``HostConnector`` of ``cli/host_connector.py``.
"""
