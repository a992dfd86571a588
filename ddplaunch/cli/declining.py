"""Reports a usage error on one node to the other nodes of the job, which then end with it too."""

from __future__ import annotations

import os
import socket

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.cli.cluster_detection import detect_cluster
from ddplaunch.cli.job_config_options import read_job_config
from ddplaunch.cli.run_options import RunOptions
from ddplaunch.core.net.decline import decline_to_join
from ddplaunch.core.net.reserved_port import PortTaken
from ddplaunch.system.plan.rendezvous import SOURCE_MISSING, locate_store


def notify_other_nodes(error: UsageError, options: RunOptions, listener_socket: socket.socket | None) -> None:
    """Make the other nodes end with this error too, unless stdin is a terminal where the command can be repeated.

    Over SSH the connections of the hosts do that. Nodes that were started one by one are not notified either, since
    this one can be started again; unless node 0's port is taken: then all need another port.
    ``listener_socket`` is on the control port, if this node has opened it.
    """
    if options.dry_run or options.hosts or options.hostfile or os.isatty(0):  # as in a shell of srun --pty
        return
    try:
        options, cluster_env = detect_cluster(options)
        if not isinstance(options.node_rank, int) or (cluster_env is None and not isinstance(error, PortTaken)):
            return
        given = (options.master_addr, options.master_port, options.init_method)
        address, port = locate_store(*given, nnodes=options.nnodes[1], here=None, environ=os.environ)
        job_config = read_job_config(options, address.value, int(port.value), cluster_env)
        if job_config.port is not None and address.source != SOURCE_MISSING:
            decline_to_join(job_config, options.node_rank, host_name(), error, listener_socket)
    except UsageError:
        pass  # the first error has been printed
