"""Faults of machines and of the network between them: node 1 or node 0 is lost."""

from collections.abc import Callable

from tests.faults.launcher import PORT
from tests.faults.rows import DEAD, HEARTBEAT, LOST, SILENCE, SOCKET, WELL, Expect, Row, lost
from tests.faults.trial import Trial
from tests.virtual_hosts.host import Host

APART = (lost(1, SILENCE), lost(0, SILENCE))
"""Each finds out by silence that the other is gone."""


def _on(node: int, what: Callable[[Host], None]) -> Callable[[Trial], None]:
    def fault(trial: Trial) -> None:
        trial.mark()
        what(trial.hosts[node])

    return fault


def _frozen(node: int) -> Callable[[Trial], None]:
    """Frozen until the other has found out, then thawed: its own time runs from there."""

    def fault(trial: Trial) -> None:
        trial.mark()
        trial.hosts[node].freeze()
        try:
            trial.ended(1 - node)
        finally:
            trial.hosts[node].thaw()
            trial.mark(node)

    return fault


def _healed(trial: Trial) -> None:
    """The cable is plugged in again once node 0 has found out; node 1 may know by then, or not."""
    trial.mark()
    trial.hosts[1].unplug()
    trial.ended(0)
    trial.hosts[1].heal()


def _bad_line(trial: Trial) -> None:
    trial.mark()
    trial.hosts[1].loss(5)
    trial.hosts[1].delay(100)
    trial.wait_seconds(3 * HEARTBEAT)


def _short_cut(trial: Trial) -> None:
    """Short: what TCP sends again, it sends later each time, so an outage of 1 s can be a silence of 2.2 s."""
    trial.mark()
    trial.hosts[1].unplug()
    trial.wait_seconds(HEARTBEAT / 4)
    trial.hosts[1].heal()
    trial.wait_seconds(HEARTBEAT)


ROWS = [
    Row("node 1 powered off", _on(1, Host.power_off), (lost(1, SILENCE), DEAD)),
    Row("node 0 powered off", _on(0, Host.power_off), (DEAD, lost(0, SILENCE))),
    Row("node 1 frozen, thawed after the verdict", _frozen(1), (lost(1, SILENCE), lost(0))),
    Row("node 0 frozen, thawed after the verdict", _frozen(0), (Expect(LOST, "was lost", SOCKET), lost(0, SILENCE))),
    Row("link cut at the switch", _on(1, Host.cut), APART),
    Row("link down on the host", _on(1, Host.link_down), APART),
    Row("unplugged: packets vanish", _on(1, Host.unplug), APART),
    Row("unplugged while the ranks compute silently", _on(1, Host.unplug), APART, mode="silent"),
    Row("unplugged, healed after the verdict", _healed, APART),
    Row("dropped by a firewall", _on(1, Host.drop), APART),
    Row("TCP reset by a firewall", _on(1, Host.reject), (lost(1), lost(0))),
    Row("control port alone dropped", _on(1, lambda host: host.drop_port(PORT + 1)), APART, torchrun=False),
    Row("unplugged for a quarter of the heartbeat timeout", _short_cut, (WELL, WELL), survives=True),
    Row("5 % loss and 100 ms delay", _bad_line, (WELL, WELL), survives=True),
]
