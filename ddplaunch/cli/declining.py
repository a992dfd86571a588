"""A command that is refused on one node of several which were started together: the others are to hear of it."""

from __future__ import annotations

import os
import socket

from ddplaunch.cli.options import RunOptions
from ddplaunch.cli.rules import read_job_config
from ddplaunch.cli.surroundings import detect_cluster
from ddplaunch.control.decline import decline_to_join
from ddplaunch.control.port import PortTaken
from ddplaunch.errors import UsageError, host_name
from ddplaunch.plan.rendezvous import SOURCE_MISSING, locate_store


def notify_other_nodes(error: UsageError, options: RunOptions, listening: socket.socket | None) -> None:
    """Let the other nodes end with this error too, unless a person is here to type the command again.

    Over SSH the hosts' own connections do so, and a person who started each node will start this one once more; but
    where node 0's port is taken, all must be started again with another one.
    ``listening`` is on the control port, if this node came so far.
    """
    if options.dry_run or options.hosts or options.hostfile or os.isatty(0):  # as in a shell of srun --pty
        return
    try:
        options, finding = detect_cluster(options)
        if not isinstance(options.node_rank, int) or (finding is None and not isinstance(error, PortTaken)):
            return
        asked = (options.master_addr, options.master_port, options.init_method)
        address, port = locate_store(*asked, nnodes=options.nnodes[1], here=None, environ=os.environ)
        rules = read_job_config(options, address.value, int(port.value), finding)
        if rules.port is not None and address.source != SOURCE_MISSING:
            decline_to_join(rules, options.node_rank, host_name(), error, listening)
    except UsageError:
        pass  # the first error is the one to mend
