"""The side of every node but node 0: connects to node 0, joins, passes messages on, and notices when it is lost."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from enum import Enum
from functools import partial

from ddplaunch.control import messages, route
from ddplaunch.control.clock_offset import PeerClock
from ddplaunch.control.failure import Outcome
from ddplaunch.control.heartbeat import Heartbeat
from ddplaunch.control.messages import PROTOCOL, Declined, FromNode, Hello, Message, Start, Stop
from ddplaunch.control.rules import Rules
from ddplaunch.dataclass import replace
from ddplaunch.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.loop import Loop, Timer
from ddplaunch.wire import proof
from ddplaunch.wire.connection import MAX_BEFORE_JOINING, Connection
from ddplaunch.wire.frames import Garbled
from ddplaunch.words import signal_name

RETRY = (0.1, 0.2, 0.4, 0.7, 1.0)  # seconds between two tries, the last again and again
FIRST_REPORT = 0.3  # seconds from the start after which people read that node 0 does not answer yet
CONNECT_PATIENCE = 4.0  # seconds until a connection that gets no answer is given up
NEXT_ADDRESS = 0.25  # seconds after which the next of node 0's addresses is tried beside the one before
GREET_PATIENCE = 5.0  # seconds in which node 0 must say its first words
LAST_CALL = 3.0  # seconds in which a node that cannot take part looks for node 0, to tell it
PARTING = 0.5  # seconds in which our last messages must have left

NOT_NODE_ZERO = "{where} does not answer as node 0: another program listens there, or node 0 is overloaded"
DROPPED = "{where} accepts the connection and closes it"


class _Bond(Enum):
    SEEKING = "node 0 is not reached yet"
    JOINED = "it has taken us in"
    ORPHANED = "it was lost while our ranks ran"
    OVER = "the job is over"


_NEXT = {
    _Bond.SEEKING: {_Bond.JOINED, _Bond.OVER},
    _Bond.JOINED: {_Bond.SEEKING, _Bond.ORPHANED, _Bond.OVER},
    _Bond.ORPHANED: {_Bond.OVER},
    _Bond.OVER: {_Bond.OVER},
}


class Member:
    """One node of a job whose node 0 is elsewhere."""

    def __init__(self, loop: Loop, rules: Rules, hello: Hello | Declined, hear: Callable[[Message], None]) -> None:
        """``hear`` gets the messages to this node."""
        assert rules.port is not None
        self._loop = loop
        self._rules = rules
        self._port = rules.port
        self._hello = hello
        self._hear = hear
        self._bond = _Bond.SEEKING
        self._tries = 0
        self._trouble = f"{self.where} has not answered yet"
        self._untried: list[tuple[socket.AddressFamily, tuple[str, int]]] = []
        self._connecting: list[socket.socket] = []
        self._connection: Connection[Message] | None = None
        self._heartbeat: Heartbeat | None = None
        self._clock = PeerClock()
        self._attempt: int | None = None  # of ours, while something of it is left
        self._latest = -1  # the attempt that started last; -1 before the first
        self._interrupted: int | None = None
        self._why_lost = ""
        self._unable: messages.Unable | None = None
        self._patience: Timer | None = None

    def _enter(self, bond: _Bond) -> None:
        assert bond in _NEXT[self._bond], f"{self._bond} to {bond}"
        self._bond = bond

    @property
    def where(self) -> str:
        """Node 0's control port, for people."""
        address = self._rules.address
        return f"[{address}]:{self._port}" if ":" in address else f"{address}:{self._port}"

    def begin(self) -> None:
        """Look for node 0, for as long as ``join_timeout``."""
        self._began_at = time.monotonic()
        self._deadline = self._loop.after(self._rules.join_timeout, self._give_up)
        self._loop.after(FIRST_REPORT, self._tell_trouble)
        self._seek()

    def tell(self, message: FromNode) -> None:
        """Pass on what the node in this process says."""
        if isinstance(message, messages.Interrupted):
            self._interrupted = message.signal
        if isinstance(message, messages.Drained) and message.attempt == self._attempt:
            self._attempt = None
        if self._connection is not None and (self._bond is _Bond.JOINED or self._may_have_joined(message)):
            self._connection.send(message)
        if isinstance(message, messages.ForRanks):
            return  # changes nothing for this node
        if isinstance(message, messages.Warned) and self._bond is _Bond.SEEKING:
            name = signal_name(message.signal)
            return self._over(Outcome(EXIT_PREEMPTED, remark=f"preempted by {name}: no rank was running"))
        if isinstance(message, messages.Unable) and self._bond is _Bond.SEEKING:
            self._unable = message  # the others should know it too, if node 0 can be reached
            self._loop.after(LAST_CALL, partial(self._refuse, message.message, message.hint))
        # While no rank runs here, we leave as soon as somebody wants it. But how an attempt ended is for node 0 to say,
        # whatever else it hears from us meanwhile: a signal may have come elsewhere before ours.
        wants_to_leave = isinstance(message, messages.Interrupted)
        if self._attempt is None and (wants_to_leave or self._bond is _Bond.ORPHANED):
            self._end_alone()

    def _may_have_joined(self, message: FromNode) -> bool:
        """Whether node 0 has our hello, and its answer is perhaps on its way: it then expects why we leave."""
        assert self._connection is not None
        return isinstance(message, messages.Interrupted) and self._connection.hear == self._answered

    def close(self) -> None:
        self._enter(_Bond.OVER)
        self._stop_connecting()
        if self._heartbeat is not None:
            self._heartbeat.close()
        if self._connection is not None:
            self._connection.part(PARTING)

    @property
    def closed(self) -> bool:
        """Whether our last words have left."""
        return self._connection is None or not self._connection.open

    # ------------------------------------------------------------------------------------------------------ seeking

    def _seek(self) -> None:
        if self._bond is _Bond.SEEKING:
            lookup = route.Lookup(self._rules.address, self._port)
            self._loop.watch(lookup.fileno(), partial(self._resolved, lookup))

    def _resolved(self, lookup: route.Lookup) -> None:
        self._loop.forget(lookup.fileno())
        lookup.close()
        if self._bond is not _Bond.SEEKING:
            return
        if lookup.error is not None:
            if lookup.error.errno in (socket.EAI_AGAIN, socket.EAI_SYSTEM):
                return self._again(f"the name server does not answer for {self._rules.address}")
            return self._again(f"{self._rules.address} does not resolve yet")
        self._untried = lookup.addresses
        self._wait(CONNECT_PATIENCE, "{where} does not answer: does a firewall block it?")
        self._connect_next()

    def _connect_next(self) -> None:
        """Try the next address, soon the one after it; the first connection that is made is taken (RFC 8305)."""
        while self._untried and not self._connect(*self._untried.pop(0)):
            pass
        if self._untried:
            self._loop.after(NEXT_ADDRESS, partial(self._connect_another, self._connecting[-1]))
        elif not self._connecting:
            self._again(self._trouble)

    def _connect_another(self, last: socket.socket) -> None:
        if last in self._connecting:
            self._connect_next()

    def _connect(self, family: socket.AddressFamily, where: tuple[str, int]) -> bool:
        """Begin one connection; return whether there is hope."""
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return False
        try:
            if self._rules.interface and (source := route.address_on(self._rules.interface, family)):
                sock.bind((source, 0))
            sock.connect(where)
        except BlockingIOError:
            pass
        except OSError as error:
            self._trouble = self._unreached(error.errno or 0)
            sock.close()
            return False
        self._connecting.append(sock)
        self._loop.watch(sock.fileno(), partial(self._connected, sock), write=True)
        return True

    def _connected(self, sock: socket.socket) -> None:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if not code and sock.getsockname() == sock.getpeername():
                # TCP's simultaneous open with ourselves: our own port was this one, so no process listens there.
                code = errno.ECONNREFUSED
        except OSError as error:  # it has gone already
            code = error.errno or errno.ECONNRESET
        self._loop.forget(sock.fileno())
        self._connecting.remove(sock)
        if code:
            sock.close()
            self._trouble = self._unreached(code)
            if not self._connecting:
                self._connect_next()
            return
        self._stop_connecting()
        accepted = (messages.Welcome,)
        self._connection = Connection(self._loop, sock, accepted, self._welcomed, self._misled, MAX_BEFORE_JOINING)
        self._wait(GREET_PATIENCE, NOT_NODE_ZERO)

    def _unreached(self, code: int) -> str:
        return f"{self.where}: {os.strerror(code).lower()}"

    def _wait(self, seconds: float, trouble: str) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self._loop.after(seconds, lambda: self._again(trouble.format(where=self.where)))

    def _stop_connecting(self) -> None:
        for sock in self._connecting:
            self._loop.forget(sock.fileno())
            sock.close()
        self._connecting.clear()
        self._untried.clear()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _again(self, trouble: str) -> None:
        self._stop_connecting()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._bond is not _Bond.SEEKING:
            return
        self._trouble = trouble
        if time.monotonic() - self._began_at > FIRST_REPORT:
            self._tell_trouble()
        self._loop.after(RETRY[min(self._tries, len(RETRY) - 1)], self._seek)
        self._tries += 1

    def _tell_trouble(self) -> None:
        if self._bond is _Bond.SEEKING:
            self._hear(messages.Seeking(self._trouble))

    def _give_up(self) -> None:
        if self._bond is _Bond.SEEKING:
            why = f"node 0 was not reached in {self._rules.join_timeout:g} s (--join-timeout): {self._trouble}"
            with_rank = " with --node-rank 0" if isinstance(self._hello, Hello) and self._hello.numbered else ""
            hint = f"is the same command running there{with_rank}, and is the port open from here?"
            self._over(Outcome(EXIT_UNAVAILABLE, remark=f"{why}\n  {hint}"))

    # ------------------------------------------------------------------------------------------------------ joining

    def _misled(self, why: str) -> None:
        closed = "closed" in why or "broke" in why
        self._connection = None
        self._again((DROPPED if closed else NOT_NODE_ZERO).format(where=self.where))

    def _welcomed(self, message: Message) -> None:
        assert isinstance(message, messages.Welcome)
        connection = self._connection
        assert connection is not None
        if message.ddplaunch != PROTOCOL:
            spoken = f"it speaks protocol {message.ddplaunch}, this one {PROTOCOL}"
            why = f"node 0 runs another version of ddplaunch: {spoken}"
            return self._refuse(why, "install the same version on every node")
        ours = proof.nonce()
        self._nonces = (message.nonce, ours)
        token = self._rules.token
        proven = proof.prove(token, proof.MEMBER, self._nonces) if token else None
        connection.expect((messages.Joined, messages.Refused), MAX_BEFORE_JOINING)
        connection.hear = self._answered
        connection.send(replace(self._hello, nonce=ours, proof=proven))
        self._wait(GREET_PATIENCE, "node 0 at {where} does not answer a hello")

    def _answered(self, message: Message) -> None:
        assert self._connection is not None
        if self._bond is not _Bond.SEEKING:
            return
        if isinstance(message, messages.Refused):
            return self._refuse(message.message, message.hint)
        assert isinstance(message, messages.Joined)
        if isinstance(self._hello, Declined):
            raise Garbled("a welcome to a node that takes no part")
        given = message.node_rank
        if given is not None and (self._hello.numbered or not 0 < given < self._rules.max_nodes):
            raise Garbled("a node rank that cannot be ours")
        token = self._rules.token
        if token and not proof.proves(message.proof, token, proof.NODE_ZERO, self._nonces):
            return self._refuse(f"node 0 at {self.where} does not know the token", "give every node the same --token")
        self._stop_connecting()
        if given is not None:  # should node 0 go before the start, we would like the same from the next
            self._hello = replace(self._hello, share=replace(self._hello.share, node_rank=given))
        self._enter(_Bond.JOINED)
        self._deadline.cancel()
        self._tries = 0
        self._connection.expect(messages.FROM_NODE_ZERO)
        self._connection.hear = self._heard
        self._connection.lost = self._lost
        self._clock = PeerClock()
        self._heartbeat = Heartbeat(self._loop, message.heartbeat_timeout, self._beat, self._silent)
        self._heartbeat.heard(0)
        if self._unable is not None:
            return self._connection.send(self._unable)
        self._hear(message)

    # ------------------------------------------------------------------------------------------------------- joined

    def _heard(self, message: Message) -> None:
        assert self._heartbeat is not None
        assert self._connection is not None
        if self._bond is _Bond.OVER:
            return
        self._heartbeat.heard(0)
        match message:
            case messages.Beat():
                return self._clock.hear(message)
            case messages.JoinStatus() if self._latest >= 0:
                raise Garbled("who has joined, after the start")
            case messages.End():
                self._enter(_Bond.OVER)
            case Start():
                self._check_start(message)
                self._attempt = self._latest = message.attempt
                interface = self._rules.interface or route.interface_of(self._connection.here)
                message = replace(message, address=self._connection.there, interface=interface)
        self._hear(message)

    def _check_start(self, order: Start) -> None:
        """Check that we can start so: once an attempt, at a place where our ranks fit."""
        assert isinstance(self._hello, Hello)
        if self._attempt is not None or order.attempt <= self._latest:
            raise Garbled("a start out of turn")
        place, share = order.place, self._hello.share
        if place is None or order.shares or not place.nnodes <= self._rules.max_nodes:
            raise Garbled("a start without this node")
        if not (0 < place.node_rank < place.nnodes and place.node_rank <= place.first_rank):
            raise Garbled("a start at another node's place")
        if place.first_rank + len(share.devices) > place.world_size:
            raise Garbled("a start with other ranks than this node's")

    def _beat(self) -> None:
        if self._connection is not None:
            self._connection.send(self._clock.beat())

    def _silent(self, peer: int, seconds: float) -> None:
        if self._connection is not None:
            self._connection.close()
        self._lost(f"nothing was heard of it for {seconds:.1f} s")

    def _lost(self, why: str) -> None:
        """Node 0 is lost: look for it again if nothing has started, else end."""
        self._connection = None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._bond is not _Bond.JOINED:
            return
        if self._latest < 0:
            self._enter(_Bond.SEEKING)
            self._deadline = self._loop.after(self._rules.join_timeout, self._give_up)
            return self._again(f"node 0 at {self.where} was lost: {why}")
        self._enter(_Bond.ORPHANED)
        self._why_lost = f"node 0 ({self._rules.address}) was lost: {why}"
        if self._attempt is None:
            return self._end_alone()
        self._hear(messages.Alone())
        self._hear(messages.Note(f"{self._why_lost}; stopping the ranks here"))
        self._hear(Stop(self._attempt, signal.SIGTERM, self._rules.grace))

    def _refuse(self, message: str, hint: str | None) -> None:
        self._over(Outcome(EXIT_USAGE, refused=(message, hint)))

    def _end_alone(self) -> None:
        lost = Outcome(EXIT_UNAVAILABLE, remark=self._why_lost)
        self._over(lost if self._interrupted is None else Outcome(EXIT_SIGNAL + self._interrupted))

    def _over(self, outcome: Outcome) -> None:
        if self._bond is not _Bond.OVER:
            self._enter(_Bond.OVER)
            self._hear(messages.Alone())
            self._hear(messages.End(outcome))
