"""The fault matrix: each row is a fault, when it happens, and what is expected of each launcher."""

from collections import Counter
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP, SIGTERM

from tests.tools.faults.actions import (
    joining,
    leave_grandchild,
    mark_fault,
    on_host,
    only_ddplaunch,
    order_rank,
    running,
    sequence,
    signal_launcher,
    signal_rank,
    start,
    start_both,
    starting,
    take_port,
    until_noticed,
    wait,
    wait_for_end,
    wait_for_output,
    wait_for_ranks,
)
from tests.tools.faults.rows import DEAD, HEARTBEAT, LOST, SILENCE, SOCKET, WELL, Action, Expect, Row, both, lost
from tests.tools.faults.trial import PORT
from tests.tools.virtual_hosts.host import Host

GRACE = 2.0
STOPPED = GRACE + SOCKET
JOIN_TIMEOUT = 1.0
JOIN_BOUND = JOIN_TIMEOUT + 2 * SOCKET
"""Seconds from the start of a launcher, which itself takes some time, to the end of its attempt to join."""

SHORT_GRACE = ("--grace", f"{GRACE:g}")
LONG_GRACE = ("--grace", "60")
"""A grace that must not be used: the job is to end at once."""
SHORT_JOIN = ("--join-timeout", f"{JOIN_TIMEOUT:g}")

# What a launcher reports.
KILLED = both(137, r"rank 3 was ended by SIGKILL")
FAILED = "rank 1 exited with code 3"
BOTH_LOST = (lost(1, SILENCE), lost(0, SILENCE))  # each misses the heartbeats of the other
MISSING = Expect(LOST, r"only 1 of 2 nodes joined in .*--join-timeout\): node 1 is missing", JOIN_BOUND)
UNREACHED = Expect(LOST, rf"{JOIN_TIMEOUT:g} s \(--join-timeout\)", JOIN_BOUND)
CONTROL_PORT_TAKEN = Expect(2, rf"--control-port {PORT + 1} is in use by", 2 * SOCKET)
REFUSED = Expect(2, rf"--master-port {PORT} is in use by", 2 * SOCKET)
RUNNING_ALREADY = Expect(2, "taken twice|running already", 2 * SOCKET)

kill = (signal_launcher(0, SIGKILL), signal_launcher(1, SIGKILL))
suspend = (signal_launcher(0, SIGSTOP), signal_launcher(1, SIGSTOP))
resume = (signal_launcher(0, SIGCONT), signal_launcher(1, SIGCONT))
unplug, heal = on_host(1, lambda host: host.cable.unplug()), on_host(1, Host.heal)

# Ranks that ignore SIGTERM have received it on both nodes, and their grace runs.
stopping = sequence(
    running, signal_launcher(0, SIGTERM), wait_for_output(1, "SIGTERM on node 0"),
    only_ddplaunch(wait_for_output(0, "stopping 2 ranks")),
)  # fmt: skip
# A rank has failed on node 0, both nodes have reported it, and wait for ranks that ignore SIGTERM.
failing = sequence(running, order_rank("exit", 1), wait_for_output(0, FAILED), wait_for_output(1, FAILED))
node_1_late = sequence(
    start(0), only_ddplaunch(wait_for_output(0, "1/2 nodes joined")), wait(HEARTBEAT), start(1), wait_for_ranks
)
node_0_late = sequence(
    start(1), only_ddplaunch(wait_for_output(0, "waiting for node 0")), wait(HEARTBEAT), start(0),
    lambda trial: trial.runs.reverse(), wait_for_ranks,
)  # fmt: skip
two_jobs = sequence(running, start_both, only_ddplaunch(wait_for_end(2), wait_for_end(3)))


def signal_twice(node: int, number: int) -> Action:
    """Signal a node twice: only the second signal kills at once, as schedulers send the first one to every node."""
    once = signal_launcher(node, number)
    return sequence(once, wait_for_output(node, "stopping 2 ranks"), mark_fault, once)


def kill_while_joining(node: int) -> Action:
    """Kill a launcher; the other waits for it to come back, and is stopped here."""
    noticed = wait_for_output(1 - node, "has left|waiting for node 0")
    return sequence(kill[node], wait_for_end(node), noticed, mark_fault, signal_launcher(1 - node, SIGINT))


def make_signal_rows(moment: str, when: Action) -> list[Row]:
    """Rows for Ctrl-C and SIGTERM on either node."""
    return [
        Row(f"{name} on node {node} {moment}", signal_launcher(node, number), when, both(128 + number))
        for name, number in (("Ctrl-C", SIGINT), ("SIGTERM", SIGTERM))
        for node in (0, 1)
    ]


# fmt: off
ROWS = [
    # Ranks: each fails the job, or with --max-restarts 1 begins a second attempt.
    Row("rank killed -9", signal_rank(SIGKILL), running, KILLED, restarts=True),
    Row("rank exits 3", order_rank("exit"), running, both(3, "rank 3 exited with code 3"), restarts=True),
    Row("rank raises", order_rank("raise"), running, both(1, "rank 3 failed with ValueError: as ordered"),
        restarts=True),
    Row("rank killed -9 while the others compute silently", signal_rank(SIGKILL), running, KILLED, "silent",
        restarts=True),
    Row("rank stopped, then continued", sequence(signal_rank(SIGSTOP), wait(SILENCE), signal_rank(SIGCONT)), running,
        (WELL, WELL), survives=True),
    Row("grandchild left behind by a job that ends well", leave_grandchild, running,
        (WELL, Expect(0, "killed leftover processes .*sleep")), "silent", survives=True),
    Row("grandchild left behind by a rank killed -9", sequence(leave_grandchild, signal_rank(SIGKILL)), running, KILLED,
        restarts=True),

    # Launchers, while ranks run.
    Row("launcher of node 1 killed -9", kill[1], running, (lost(1), DEAD)),
    Row("launcher of node 0 killed -9", kill[0], running, (DEAD, lost(0))),
    Row("launcher of node 1 killed -9 while the ranks compute silently", kill[1], running, (lost(1), DEAD), "silent"),
    Row("launcher of node 1 stopped for half the heartbeat timeout",
        sequence(suspend[1], wait(HEARTBEAT / 2), resume[1], wait(HEARTBEAT)), running, (WELL, WELL), "silent",
        survives=True),
    Row("launcher of node 1 stopped, continued after the verdict", until_noticed(1, suspend[1], resume[1]), running,
        (lost(1, SILENCE), lost(0))),
    Row("launcher of node 0 stopped, continued after the verdict", until_noticed(0, suspend[0], resume[0]), running,
        (Expect(LOST, "was lost"), lost(0, SILENCE))),
    Row("Ctrl-C on node 0", signal_launcher(0, SIGINT), running, (Expect(130), Expect(130, "Ctrl-C on node 0"))),
    Row("Ctrl-C on node 1", signal_launcher(1, SIGINT), running, (Expect(130, "Ctrl-C on node 1"), Expect(130))),
    Row("Ctrl-C on node 0 while the ranks compute silently", signal_launcher(0, SIGINT), running,
        (Expect(130), Expect(130, "Ctrl-C on node 0")), "silent"),
    Row("SIGTERM on node 0", signal_launcher(0, SIGTERM), running, (Expect(143), Expect(143, "SIGTERM on node 0"))),
    Row("SIGTERM on node 1", signal_launcher(1, SIGTERM), running, (Expect(143, "SIGTERM on node 1"), Expect(143))),
    Row("SIGTERM on node 1, which the ranks ignore", signal_launcher(1, SIGTERM), running, both(143, within=STOPPED),
        "deaf", SHORT_GRACE),

    # Launchers, while the job stops. Ctrl-C again ends the ranks at once; SIGTERM again, which schedulers send, leaves
    # them their grace.
    Row("Ctrl-C on node 0 while the job stops for SIGTERM", signal_launcher(0, SIGINT), stopping, both(143),
        "stubborn", LONG_GRACE, torchrun=False),
    Row("Ctrl-C, twice, on node 1 while the job stops for SIGTERM", signal_twice(1, SIGINT), stopping, both(143),
        "stubborn", LONG_GRACE, torchrun=False),
    Row("SIGTERM on node 0 while the job stops for SIGTERM", signal_launcher(0, SIGTERM), stopping,
        both(143, within=STOPPED), "stubborn", SHORT_GRACE, torchrun=False),
    Row("SIGTERM, twice, on node 1 while the job stops for SIGTERM", signal_twice(1, SIGTERM), stopping,
        both(143, within=STOPPED), "stubborn", SHORT_GRACE, torchrun=False),
    Row("launcher of node 1 killed -9 while the job stops for SIGTERM", kill[1], stopping,
        (Expect(143, within=STOPPED), DEAD), "deaf", SHORT_GRACE, torchrun=False),
    Row("launcher of node 0 killed -9 while the job stops for SIGTERM", kill[0], stopping, (DEAD, lost(0, STOPPED)),
        "deaf", SHORT_GRACE, torchrun=False),
    Row("launcher of node 1 killed -9 while the job stops for a failure", kill[1], failing,
        (Expect(3, FAILED, STOPPED), DEAD), "deaf", SHORT_GRACE, torchrun=False),
    Row("Ctrl-C on node 1 while the job stops for a failure", signal_launcher(1, SIGINT), failing,
        both(130, FAILED, STOPPED), "deaf", SHORT_GRACE, torchrun=False),

    # Machines, and the network between them.
    Row("node 1 powered off", on_host(1, Host.power_off), running, (lost(1, SILENCE), DEAD)),
    Row("node 0 powered off", on_host(0, Host.power_off), running, (DEAD, lost(0, SILENCE))),
    Row("node 1 frozen, thawed after the verdict", until_noticed(1, on_host(1, Host.freeze), on_host(1, Host.thaw)),
        running, (lost(1, SILENCE), lost(0))),
    Row("node 0 frozen, thawed after the verdict", until_noticed(0, on_host(0, Host.freeze), on_host(0, Host.thaw)),
        running, (Expect(LOST, "was lost", SOCKET), lost(0, SILENCE))),
    Row("link cut at the switch", on_host(1, lambda host: host.cable.cut()), running, BOTH_LOST),
    Row("link down on the host", on_host(1, lambda host: host.cable.link_down()), running, BOTH_LOST),
    Row("unplugged: packets vanish", unplug, running, BOTH_LOST),
    Row("unplugged while the ranks compute silently", unplug, running, BOTH_LOST, "silent"),
    # Node 1 may have noticed by then, or not.
    Row("unplugged, healed after the verdict", sequence(unplug, wait_for_end(0), heal), running, BOTH_LOST),
    Row("dropped by a firewall", on_host(1, Host.drop), running, BOTH_LOST),
    Row("TCP reset by a firewall", on_host(1, Host.reject), running, (lost(1), lost(0))),
    Row("control port alone dropped", on_host(1, lambda host: host.drop_port(PORT + 1)), running, BOTH_LOST,
        torchrun=False),
    # Short, as TCP doubles the time of each retransmission: an outage of 1 s can be a silence of 2.2 s.
    Row("unplugged for a quarter of the heartbeat timeout",
        sequence(unplug, wait(HEARTBEAT / 4), heal, wait(HEARTBEAT)), running, (WELL, WELL), survives=True),
    Row("5 % loss and 100 ms delay",
        sequence(
            on_host(1, lambda host: host.loss(5)),
            on_host(1, lambda host: host.cable.delay(100)),
            wait(3 * HEARTBEAT),
        ),
        running, (WELL, WELL), survives=True),

    # Before ranks run.
    *make_signal_rows("during join", joining),
    Row("launcher of node 0 killed -9 during join", kill_while_joining(0), joining, (DEAD, Expect(130)),
        torchrun=False),
    Row("launcher of node 1 killed -9 during join", kill_while_joining(1), joining, (Expect(130), DEAD),
        torchrun=False),
    *make_signal_rows("during start", starting),
    Row("launcher of node 0 killed -9 during start", kill[0], starting, (DEAD, lost(0))),
    Row("launcher of node 1 killed -9 during start", kill[1], starting, (lost(1), DEAD)),

    # Nodes that come late or not at all, or cannot connect.
    Row("node 1 starts late", None, node_1_late, (WELL, WELL), survives=True),
    Row("node 0 starts late", None, node_0_late, (WELL, WELL), survives=True),
    Row("node 1 never comes", None, start(0), (MISSING,), "silent", SHORT_JOIN),
    Row("wrong address on node 1", None, sequence(start(0), start(1, address="10.77.0.99")), (MISSING, UNREACHED),
        "silent", SHORT_JOIN),
    Row("wrong port on node 1", None, sequence(start(0), start(1, port=PORT + 100)), (MISSING, UNREACHED), "silent",
        SHORT_JOIN),
    Row("master port taken on node 0", None, sequence(take_port(PORT), start_both), (REFUSED, REFUSED), "silent",
        SHORT_JOIN),
    Row("control port taken on node 0", None, sequence(take_port(PORT + 1), start_both),
        (CONTROL_PORT_TAKEN, UNREACHED), "silent", SHORT_JOIN, torchrun=False),
    Row("firewall that drops", None, sequence(on_host(1, Host.drop), start_both), (MISSING, UNREACHED), "silent",
        SHORT_JOIN),
    # The first job must not be affected by the second one on the same hosts and port.
    Row("two jobs on one port", None, two_jobs, (WELL, WELL, REFUSED, RUNNING_ALREADY), survives=True),
]
# fmt: on

assert max(Counter(row.name for row in ROWS).values()) == 1, "names of rows are unique"
