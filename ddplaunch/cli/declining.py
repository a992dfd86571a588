"""Reports a usage error on one node to the other nodes of the job, which then end with it too."""

from __future__ import annotations

import os
import socket

from ddplaunch.base.errors import UsageError, host_name
from ddplaunch.cli.cluster_detection import detect_cluster
from ddplaunch.cli.core_options import DryRun, Nodes, Starting
from ddplaunch.cli.job_config_options import read_job_config
from ddplaunch.core.feature import load_features
from ddplaunch.core.net.decline import decline_to_join
from ddplaunch.core.options import Options
from ddplaunch.system.network.reserved_port import PortTaken
from ddplaunch.system.plan.rendezvous import SOURCE_MISSING, locate_store


def notify_other_nodes(error: UsageError, options: Options, listener_socket: socket.socket | None) -> None:
    """Make the other nodes end with this error too, unless stdin is a terminal where the command can be repeated.

    A feature that runs the job in place of this launcher does that itself. Nodes that were started one by one are not
    notified either, since this one can be started again; unless node 0's port is taken: then all need another port.
    ``listener_socket`` is on the control port, if this node has opened it.
    """
    if options[DryRun].dry_run or os.isatty(0) or load_features().run_instead(options):  # a terminal: srun --pty
        return
    try:
        options, cluster_env = detect_cluster(options)
        nodes = options[Nodes]
        if not isinstance(nodes.node_rank, int) or (cluster_env is None and not isinstance(error, PortTaken)):
            return
        given = (nodes.master_addr, nodes.master_port, options[Starting].init_method)
        address, port = locate_store(*given, nnodes=nodes.nnodes[1], here=None, environ=os.environ)
        job_config = read_job_config(options, address.value, int(port.value), cluster_env)
        if job_config.port is not None and address.source != SOURCE_MISSING:
            decline_to_join(job_config, nodes.node_rank, host_name(), error, listener_socket)
    except UsageError:
        pass  # the first error has been printed
