"""Connections between virtual hosts, which show the effect of a fault."""

import subprocess
import sys

from tests.scaled_timeouts import scaled_timeout
from tests.virtual_hosts.host import Host

ECHO = """
import socket, threading
def answer(link):
    while data := link.recv(1000):
        link.sendall(data)
def tcp(server):
    while True:
        threading.Thread(target=answer, args=[server.accept()[0]]).start()
servers = [socket.create_server(("", 7000)), socket.create_server(("", 7001))]
servers.append(socket.create_server(("::", 7000), family=socket.AF_INET6))
for server in servers:
    threading.Thread(target=tcp, args=[server]).start()
udp = socket.socket(type=socket.SOCK_DGRAM)
udp.bind(("", 7000))
print("ready", flush=True)
while True:
    udp.sendto(*udp.recvfrom(1000))
"""
"""Sends back what comes, on TCP ports 7000 and 7001 and UDP port 7000."""

TALK = """
import socket, sys, time
def attempt(action, *words):
    began = time.monotonic()
    try:
        text = action(*words)
    except OSError as error:
        text = type(error).__name__
    print(text, time.monotonic() - began, flush=True)
def connect():
    global link
    link = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))
    return "connected"
def ask(timeout):
    link.settimeout(timeout)
    link.sendall(b"x")
    return "answer" if link.recv(1) else "end"
attempt(connect)
for line in sys.stdin:
    attempt(ask, float(line))
"""
"""Connects to ADDRESS PORT within SECONDS; for each number read, asks and waits that many seconds for the answer."""


class EchoConnection:
    """A TCP connection from a host to the echo on another."""

    def __init__(self, host: Host, address: str, port: int = 7000, timeout: float | None = None) -> None:
        self.process = host.start(
            [sys.executable, "-IS", "-c", TALK, address, str(port), str(timeout or scaled_timeout(10))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.connected = self.end()

    def end(self) -> str:
        """What came back: "answer", "end" or the name of an exception; how long it took is in ``seconds``."""
        assert self.process.stdout is not None
        result, seconds = self.process.stdout.readline().split()
        self.seconds = float(seconds)
        return str(result)

    def begin(self, timeout: float) -> None:
        """Send a request; :meth:`end` waits for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{timeout}\n")
        self.process.stdin.flush()

    def ask(self, timeout: float | None = None) -> str:
        """Ask, and say what comes back; by default waits long for an answer."""
        self.begin(scaled_timeout(10) if timeout is None else timeout)
        return self.end()


def echo(host: Host) -> None:
    """Start the echo server on a host."""
    process = host.start([sys.executable, "-IS", "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
