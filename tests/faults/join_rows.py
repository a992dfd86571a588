"""Faults before ranks run: while nodes join, while ranks start, and nodes that cannot connect."""

import signal
import sys
from collections.abc import Callable

from tests.faults.launcher import PORT
from tests.faults.rows import DEAD, HEARTBEAT, LOST, SOCKET, WELL, Expect, Row, both, killed, lost, signalled
from tests.faults.trial import Trial

JOIN_TIMEOUT = 1.0
JOIN_TIMEOUT_OPTION = ("--join-timeout", f"{JOIN_TIMEOUT:g}")
GIVEN_UP = JOIN_TIMEOUT + 2 * SOCKET
"""Seconds from the start of a launcher, which itself takes some time, to its giving up."""

TAKEN = """if True:
    import socket, sys, time
    sock = socket.create_server(("", int(sys.argv[1])))
    print("ready", flush=True)
    time.sleep(1000)
"""

ALONE = Expect(LOST, r"only 1 of 2 nodes joined in .*--join-timeout\): node 1 is missing", GIVEN_UP)
UNREACHED = Expect(LOST, rf"{JOIN_TIMEOUT:g} s \(--join-timeout\)", GIVEN_UP)


def _nothing(trial: Trial) -> None:
    """No further fault: the start itself is the fault."""


def _joining(trial: Trial) -> None:
    """Two of three nodes have joined."""
    trial.begin(0, nnodes=3)
    trial.begin(1, nnodes=3)
    if trial.launcher == "torchrun":
        return trial.until(lambda: trial.runs[1].connected(PORT), "a connection")
    for number in (0, 1):
        trial.wait_for_output(number, "2/3 nodes joined")


def _starting(trial: Trial) -> None:
    """The job has been started on both nodes, and torch is still being imported."""
    if trial.launcher == "torchrun":
        trial.begin(0)
        trial.begin(1)
        return trial.until(lambda: all(host.find(r"python\S* -u .*program\.py") for host in trial.hosts), "ranks")
    for number in (0, 1):
        trial.begin(number, more=("--log-dir", str(trial.folder / f"logs{number}")))
    for number in (0, 1):
        trial.until(lambda number=number: list(trial.folder.glob(f"logs{number}/**/plan.json")), "the start")  # type: ignore[misc]


def _killed_while_joining(node: int) -> Callable[[Trial], None]:
    """The other node goes on waiting, as the node may come back; here it is stopped."""

    def fault(trial: Trial) -> None:
        trial.runs[node].signal(signal.SIGKILL)
        trial.ended(node)
        trial.wait_for_output(1 - node, "has left|waiting for node 0")
        trial.mark()
        trial.runs[1 - node].signal(signal.SIGINT)

    return fault


def _late(trial: Trial) -> None:
    trial.begin(0)
    if trial.launcher == "ddplaunch":
        trial.wait_for_output(0, "1/2 nodes joined")
    trial.wait_seconds(HEARTBEAT)
    trial.begin(1)
    trial.wait_for_ranks()


def _late_zero(trial: Trial) -> None:
    trial.begin(1)
    if trial.launcher == "ddplaunch":
        trial.wait_for_output(0, "waiting for node 0")
    trial.wait_seconds(HEARTBEAT)
    trial.begin(0)
    trial.runs.reverse()
    trial.wait_for_ranks()


def _alone(trial: Trial) -> None:
    trial.begin(0)


def _wrong_address(trial: Trial) -> None:
    trial.begin(0)
    trial.begin(1, address="10.77.0.99")


def _wrong_port(trial: Trial) -> None:
    trial.begin(0)
    trial.begin(1, port=PORT + 100)


def _taken(port: int) -> Callable[[Trial], None]:
    def start(trial: Trial) -> None:
        holder = trial.hosts[0].start([sys.executable, "-IS", "-c", TAKEN, str(port)], stdout=-1)
        assert holder.stdout is not None
        with holder.stdout as pipe:
            pipe.readline()
        trial.begin(0)
        trial.begin(1)

    return start


def _firewall(trial: Trial) -> None:
    trial.hosts[1].drop()
    trial.begin(0)
    trial.begin(1)


def _two_jobs(trial: Trial) -> None:
    """The second job has the same hosts and port; the first must not mind."""
    trial.begin(0)
    trial.begin(1)
    trial.wait_for_ranks()
    trial.begin(0)
    trial.begin(1)
    if trial.launcher == "ddplaunch":
        for number in (2, 3):
            trial.ended(number)


def _rows_of(moment: str, start: Callable[[Trial], None]) -> list[Row]:
    """Ctrl-C and SIGTERM on either node."""
    return [
        Row(f"{name} on node {node} {moment}", signalled(node, number), both(128 + number), start)
        for name, number in (("Ctrl-C", signal.SIGINT), ("SIGTERM", signal.SIGTERM))
        for node in (0, 1)
    ]


_INTERRUPTED = Expect(130)
_CONTROL_PORT_TAKEN = Expect(2, rf"--control-port {PORT + 1} is in use by", 2 * SOCKET)
_REFUSED = Expect(2, rf"--master-port {PORT} is in use by", 2 * SOCKET)
_RUNNING_ALREADY = Expect(2, "taken twice|running already", 2 * SOCKET)

ROWS = [
    *_rows_of("during join", _joining),
    *(
        Row(
            f"supervisor of node {node} killed -9 during join",
            _killed_while_joining(node), ends, _joining, torchrun=False,
        )
        for node, ends in enumerate([(DEAD, _INTERRUPTED), (_INTERRUPTED, DEAD)])
    ),
    *_rows_of("during start", _starting),
    Row("supervisor of node 0 killed -9 during start", killed(0), (DEAD, lost(0)), _starting),
    Row("supervisor of node 1 killed -9 during start", killed(1), (lost(1), DEAD), _starting),
    Row("node 1 starts late", _nothing, (WELL, WELL), _late, survives=True),
    Row("node 0 starts late", _nothing, (WELL, WELL), _late_zero, survives=True),
    Row("node 1 never comes", _nothing, (ALONE,), _alone, "silent", JOIN_TIMEOUT_OPTION),
    Row("wrong address on node 1", _nothing, (ALONE, UNREACHED), _wrong_address, "silent", JOIN_TIMEOUT_OPTION),
    Row("wrong port on node 1", _nothing, (ALONE, UNREACHED), _wrong_port, "silent", JOIN_TIMEOUT_OPTION),
    Row("master port taken on node 0", _nothing, (_REFUSED, _REFUSED), _taken(PORT), "silent", JOIN_TIMEOUT_OPTION),
    Row(
        "control port taken on node 0", _nothing, (_CONTROL_PORT_TAKEN, UNREACHED),
        _taken(PORT + 1), "silent", JOIN_TIMEOUT_OPTION, torchrun=False,
    ),
    Row("firewall that drops", _nothing, (ALONE, UNREACHED), _firewall, "silent", JOIN_TIMEOUT_OPTION),
    Row("two jobs on one port", _nothing, (WELL, WELL, _REFUSED, _RUNNING_ALREADY), _two_jobs, survives=True),
]  # fmt: skip
