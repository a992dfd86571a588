"""One network interface of a virtual host and its cable to a switch, with faults."""

import os
import subprocess
import sys
from pathlib import Path

from tests.tools.virtual_hosts.namespaces import NET, HostError, NetworkNamespace, in_thread, setns

_RELAY = Path(__file__).with_name("frame_delay.py")


class Cable:
    """A cable from ``interface`` in the host to ``port`` in the switch."""

    def __init__(
        self, switch: NetworkNamespace, bridge: str, port: str, interface: str, mac: str, settings: list[str]
    ) -> None:
        """``settings``: idempotent ``ip`` commands that configure the interface once it is up."""
        self.switch, self.bridge, self.port = switch, bridge, port
        self.interface, self.mac, self.settings = interface, mac, settings
        self.inside = NetworkNamespace(-1)
        """The network namespace of the host since the cable was plugged in."""
        self._relay: subprocess.Popen[bytes] | None = None

    def plug(self, inside: NetworkNamespace, pid: int) -> None:
        """Plug it into the host with this network namespace, in which ``pid`` runs."""
        self.switch.ip(
            f"link add {self.port} type veth peer name {self.interface} address {self.mac} netns {pid}",
            f"link set {self.port} master {self.bridge} up",
        )
        self.inside = inside
        inside.ip(f"link set {self.interface} up", *self.settings)

    def pull(self) -> None:
        """Pull the cable: this removes the interface, and the faults of the cable."""
        self._stop_relay()
        if self.inside.fd >= 0:
            self.switch.ip(f"link del {self.port}")

    def close(self) -> None:
        """End its relay process. The kernel removes the rest with the network namespaces."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            self._relay = None

    def cut(self) -> None:
        """Switch the port off: the host loses its carrier; addresses and routes stay."""
        self.switch.ip(f"link set {self.port} down")

    def unplug(self) -> None:
        """Take the port out of the switch: what is sent vanishes, and the host keeps its carrier."""
        self.switch.ip(f"link set {self.port} nomaster")

    def link_down(self) -> None:
        """Switch the interface off inside the host."""
        self.inside.ip(f"link set {self.interface} down")

    def narrow(self, rate: str) -> None:
        """Limit the rate ("10mbit") in each direction; packets that wait longer than 400 ms are lost."""
        self._queue(*f"tbf rate {rate} burst 32kb latency 400ms".split())

    def heal(self) -> None:
        """Undo all faults of the cable."""
        self._stop_relay()
        self._queue("noqueue")
        self.switch.ip(f"link set {self.port} master {self.bridge} up")
        self.inside.ip(f"link set {self.interface} up", *self.settings)

    def _queue(self, *discipline: str) -> None:
        """Set the queueing discipline of both ends."""
        for namespace, device in ((self.inside, self.interface), (self.switch, self.port)):
            namespace.call("tc", "qdisc", "replace", "dev", device, "root", *discipline)

    def delay(self, milliseconds: float) -> None:
        """Delay all packets in each direction.

        The cable gets a relay: port, a bridge of its own, a TAP; the relay; a TAP in the switch's bridge.
        """
        self._stop_relay()
        near, far = f"{self.port}-near", f"{self.port}-far"

        def start() -> subprocess.Popen[bytes]:
            setns(self.switch.fd, NET)
            test_process = os.pidfd_open(os.getpid())
            words = [sys.executable, "-IS", str(_RELAY), str(milliseconds), near, far, str(test_process)]
            try:
                return subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[test_process],
                    start_new_session=True,
                )
            finally:
                os.close(test_process)

        self._relay = in_thread(start)
        wait_for_ready(self._relay, "the relay")
        self.switch.ip(
            f"link add {self.port}-line type bridge forward_delay 0 mcast_snooping 0",
            f"link set {self.port}-line up",
            f"link set {near} master {self.port}-line up",
            f"link set {far} master {self.bridge} up",
            f"link set {self.port} master {self.port}-line",
        )

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self.close()
            self.switch.ip(f"link del {self.port}-line")
            self.switch.ip(f"link set {self.port} master {self.bridge}")


def wait_for_ready(process: subprocess.Popen[bytes], what: str) -> None:
    """Wait until it prints "ready"; raise an error with any other output."""
    assert process.stdout is not None
    with process.stdout as pipe:
        line = pipe.readline()
        if line != b"ready\n":
            process.kill()
            process.wait()
            raise HostError(f"{what} did not start: {(line + pipe.read()).decode(errors='replace')}")
