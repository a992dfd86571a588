"""Tests of what each fault of a virtual host does to its connections."""

import sys
from collections.abc import Callable

import pytest

from tests.scaled_timeouts import scaled_timeout
from tests.virtual_hosts.echo_connection import EchoConnection, echo
from tests.virtual_hosts.host import Host
from tests.virtual_hosts.network import Network

pytestmark = pytest.mark.ci

Make = Callable[..., Network]
Pair = tuple[Host, Host, EchoConnection]


@pytest.fixture
def pair(network: Make) -> Pair:
    """Two hosts and a connection from the first to the echo on the second."""
    one, other = network(2).hosts
    echo(other)
    talk = EchoConnection(one, other.address)
    assert (talk.connected, talk.ask()) == ("connected", "answer")
    return one, other, talk


SILENT = "TimeoutError"


def test_the_second_interface_is_another_network(network):
    one, other = network(2, second=True).hosts
    echo(other)
    assert other.address_second == "10.78.0.11"
    talk = EchoConnection(one, other.address_second)
    one.unplug()
    assert talk.ask() == "answer"
    assert EchoConnection(one, other.address, timeout=0.5).connected == SILENT
    one.heal()
    one.drop(other)
    assert talk.ask(0.5) == SILENT


def test_power_off_is_silent_and_boot_brings_the_host_back(pair):
    one, other, talk = pair
    other.power_off()
    assert (other.alive, other.processes()) == (False, [])
    assert talk.ask(0.7) == SILENT
    other.boot()
    # A host that has booted knows nothing of its old connections.
    assert talk.ask() == "ConnectionResetError"
    assert EchoConnection(one, other.address).connected == "ConnectionRefusedError"
    echo(other)
    for address in (other.address, other.address6):
        assert EchoConnection(one, address).ask() == "answer"


def test_kill_all_ends_connections_at_once(pair):
    one, other, talk = pair
    other.freeze()  # so that the question waits
    talk.begin(10)
    other.kill_all()
    assert talk.end() in ("end", "ConnectionResetError")
    assert talk.seconds < scaled_timeout(5)
    assert EchoConnection(one, other.address).connected == "ConnectionRefusedError"
    other.boot()
    echo(other)
    assert EchoConnection(one, other.address).ask() == "answer"


def test_frozen_processes_wait(pair):
    one, other, talk = pair
    other.freeze()
    other.freeze()
    assert talk.ask(0.5) == SILENT
    later = EchoConnection(one, other.address)
    assert (later.connected, later.ask(0.5)) == ("connected", SILENT)  # the kernel still accepts
    other.thaw()
    assert (talk.ask(), later.ask()) == ("answer", "answer")


@pytest.mark.parametrize(("fault", "carrier"), [("cut", "0"), ("unplug", "1"), ("drop", "1"), ("link_down", None)])
def test_silence(pair, fault, carrier):
    one, other, talk = pair
    getattr(other, fault)()
    if carrier is not None:
        assert other.run("cat", "/sys/class/net/eth0/carrier").strip() == carrier
    assert talk.ask(0.3) == SILENT
    assert EchoConnection(one, other.address, timeout=0.2).connected == SILENT
    assert EchoConnection(one, other.address6, timeout=0.2).connected == SILENT
    other.heal()
    assert talk.ask() == "answer"
    assert EchoConnection(one, other.address6).ask() == "answer"


def test_drop_of_one_peer(network):
    one, other, third = network(3).hosts
    echo(other)
    other.drop(third)
    assert EchoConnection(third, other.address, timeout=0.5).connected == SILENT
    assert EchoConnection(third, other.address6, timeout=0.5).connected == SILENT
    assert EchoConnection(one, other.address).ask() == "answer"


def test_drop_of_one_port(pair):
    one, other, talk = pair
    second = EchoConnection(one, other.address, 7001)
    other.drop_port(7001)
    assert (second.ask(0.5), talk.ask()) == (SILENT, "answer")
    other.heal()
    assert second.ask() == "answer"


def test_reject_resets_both_ends(pair):
    one, other, talk = pair
    echo(one)
    back = EchoConnection(other, one.address)
    other.reject()
    for reset in (talk, back):
        assert reset.ask() == "ConnectionResetError"
        assert reset.seconds < scaled_timeout(5)
    assert EchoConnection(one, other.address).connected == "ConnectionRefusedError"
    assert EchoConnection(other, one.address).connected == "ConnectionRefusedError"
    other.heal()
    assert EchoConnection(one, other.address).ask() == "answer"


def test_loss(pair):
    one, other, _ = pair
    count = """if True:
        import socket, sys
        udp = socket.socket(type=socket.SOCK_DGRAM)
        udp.settimeout(0.3)
        came = 0
        for _ in range(40):
            for _ in range(10):
                udp.sendto(b"x", (sys.argv[1], 7000))
            try:
                for _ in range(10):
                    udp.recv(1)
                    came += 1
                    udp.settimeout(0.02)
            except TimeoutError:
                pass
        print(came)
    """
    other.loss(50)
    assert 20 < int(one.run(sys.executable, "-IS", "-c", count, other.address)) < 250  # of 400, 100 to be expected
    other.heal()
    assert int(one.run(sys.executable, "-IS", "-c", count, other.address)) > 300


def test_delay(pair):
    one, other, talk = pair
    for milliseconds in (100, 30):
        other.delay(milliseconds)
        assert talk.ask() == "answer"
        assert talk.seconds >= 2 * milliseconds / 1000
    assert talk.seconds < scaled_timeout(2)  # far less than without an answer
    other.cut()
    assert talk.ask(0.5) == SILENT
    other.heal()
    assert talk.ask() == "answer"
    assert min(EchoConnection(one, other.address).seconds for _ in range(5)) < scaled_timeout(0.03)
