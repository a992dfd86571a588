"""The decisions on a node's connection to node 0, on every node but that one, as a state machine: ``core/machine.py``.

- The node seeks node 0 for up to --join-timeout. An attempt to connect resolves its name (RESOLVING), tries its
  addresses, the next one soon in parallel (CONNECTING), waits for its Welcome (GREETING) and, once the hello is sent,
  for the reply (ASKING). Each step has a timeout. After a failure the next attempt begins a moment later (PAUSING).
- A node that is stopped while it seeks ends at once. Once the hello is sent, node 0 gets the reason.
- JOINED: messages pass both ways. If node 0 is lost before this node has begun, it seeks node 0 again.
- ORPHANED: node 0 was lost while ranks were left here. They are stopped, and the node ends with their report.
- OVER: node 0, or this node, has ended the job. Nothing changes any more.

``CoordinatorClient`` has the sockets. A message that node 0 cannot have sent is a ProtocolError: node 0 is then lost.
"""

from __future__ import annotations

import os
import signal
import socket
from enum import Enum

from msgspec.structs import replace

from ddplaunch.base.errors import EXIT_PREEMPTED, EXIT_SIGNAL, EXIT_UNAVAILABLE, EXIT_USAGE
from ddplaunch.base.frames import ProtocolError
from ddplaunch.base.text import signal_name
from ddplaunch.core import messages
from ddplaunch.core.deadlines import Deadline, Deadlines, Now
from ddplaunch.core.failures import JobResult
from ddplaunch.core.job_config import JobConfig
from ddplaunch.core.machine import Machine, MachineEvent, Transitions, next_phase
from ddplaunch.core.messages import PROTOCOL_VERSION, JoinDeclined, Message, NodeHello, StartAttempt, StopAttempt
from ddplaunch.core.net import link_commands as do
from ddplaunch.core.net import link_deadlines as due
from ddplaunch.core.net import link_events as ev
from ddplaunch.core.net import token_auth
from ddplaunch.core.options import Connections, Nodes, Stopping
from ddplaunch.system.network.addresses import SocketAddress

RETRY_DELAYS_S = (0.1, 0.2, 0.4, 0.7, 1.0)  # between connection attempts; the last one repeats
FIRST_NOTICE_S = 0.3  # after the start, until it prints that node 0 does not answer yet
CONNECT_TIMEOUT_S = 4.0  # for a TCP connection, or a DNS result that leads to one
NEXT_ADDRESS_DELAY_S = 0.25  # before the next address of node 0 is tried in parallel (RFC 8305)
WELCOME_TIMEOUT_S = 5.0  # for node 0's Welcome, and for its reply to the hello
DECLINE_TIMEOUT_S = 3.0  # for a node that cannot start its ranks to reach node 0 and report that

NOT_NODE_ZERO_ERROR = "{where} does not answer as node 0: another program listens there, or node 0 is overloaded"
CLOSED_ERROR = "{where} accepts the connection and closes it"


class LinkPhase(Enum):
    """The phase of the connection to node 0."""

    PAUSING = "the next attempt to connect begins soon"
    RESOLVING = "node 0's name is looked up"
    CONNECTING = "its addresses are tried"
    GREETING = "connected, waiting for the Welcome"
    ASKING = "the hello is sent, waiting for the reply"
    JOINED = "joined"
    ORPHANED = "connection lost while ranks were running"
    OVER = "the job has ended"


class LinkStep(Enum):
    """A step of the connection: what the machine may do next."""

    RESOLVE = "look up node 0's name"
    CONNECT = "try its addresses"
    GREET = "wait for its Welcome"
    ASK = "send the hello"
    JOIN = "take part"
    RETRY = "try to connect again"
    ORPHAN = "stop the ranks without node 0"
    END = "end this node"


_FAILS: dict[LinkStep, LinkPhase] = {LinkStep.RETRY: LinkPhase.PAUSING, LinkStep.END: LinkPhase.OVER}

LINK_TRANSITIONS: Transitions[LinkPhase, LinkStep] = {
    LinkPhase.PAUSING: {LinkStep.RESOLVE: LinkPhase.RESOLVING, LinkStep.END: LinkPhase.OVER},
    LinkPhase.RESOLVING: {LinkStep.CONNECT: LinkPhase.CONNECTING, **_FAILS},
    LinkPhase.CONNECTING: {LinkStep.GREET: LinkPhase.GREETING, **_FAILS},
    LinkPhase.GREETING: {LinkStep.ASK: LinkPhase.ASKING, **_FAILS},
    LinkPhase.ASKING: {LinkStep.JOIN: LinkPhase.JOINED, **_FAILS},
    LinkPhase.JOINED: {LinkStep.ORPHAN: LinkPhase.ORPHANED, **_FAILS},
    LinkPhase.ORPHANED: {LinkStep.END: LinkPhase.OVER},
    LinkPhase.OVER: {},
}

_AFTER_SEEKING = (LinkPhase.JOINED, LinkPhase.ORPHANED, LinkPhase.OVER)


class LinkMachine(Machine):
    """The connection of one node to the coordinator, from the first attempt to connect until the end of the job."""

    def __init__(self, config: JobConfig, hello: NodeHello | JoinDeclined) -> None:
        """``hello``: if it is a JoinDeclined, the machine only delivers it to node 0, and the node does not join."""
        super().__init__()
        self._config, self._options, self._hello = config, config.options, hello
        self.phase = LinkPhase.PAUSING
        self._deadlines = Deadlines[Deadline]()
        self._began_at = 0.0
        self._retries = 0
        self._problem = f"{self.address} has not answered yet"
        self._addresses: list[SocketAddress] = []  # that are not tried yet
        self._connecting: list[int] = []  # the numbers of the sockets that are not connected yet
        self._next_number = 0
        self._nonce = ""  # of this node
        self._nonces = ("", "")  # node 0's and this node's
        self._attempt: int | None = None  # the attempt whose ranks may still run here
        self._latest = -1  # the latest attempt that has started here; -1 before the first
        self._has_begun = False  # whether node 0 has ordered more than a check
        self._stop_signal: int | None = None
        self._why_lost = ""
        self._start_error: messages.NodeStartError | None = None

    def wake_at(self) -> float | None:
        return self._deadlines.next

    @property
    def address(self) -> str:
        """Node 0's control port, for messages: "n0:29501"."""
        address, port = self._config.address, self._config.port
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    @property
    def _seeks_node_zero(self) -> bool:
        return self.phase not in _AFTER_SEEKING

    def _handle(self, event: MachineEvent, now: Now) -> None:
        match event:
            case ev.DeadlineDue():
                while (deadline := self._deadlines.pop_due(now.mono)) is not None:
                    self._record(deadline, now)
                    self._on_deadline(deadline, now)
            case ev.MessageReceived(message=message):
                self._on_message(message, now)
            case ev.MessagePosted(message=message):
                self._on_message_posted(message, now)
            case ev.Resolved() if self.phase is LinkPhase.RESOLVING:
                self._on_resolved(event, now)
            case ev.Connected() if self.phase is LinkPhase.CONNECTING:
                self._on_connected(event, now)
            case ev.ConnectFailed() if self.phase is LinkPhase.CONNECTING:
                self._on_connect_failed(event, now)
            case ev.ConnectionLost(reason=reason):
                self._on_lost(reason, now)
            case ev.Start():
                self._began_at = now.mono
                self._deadlines.set(due.JoinTimeoutOver(), now.mono + self._options[Connections].join_timeout)
                self._deadlines.set(due.NoAnswerNoticeDue(), now.mono + FIRST_NOTICE_S)
                self._resolve()
            case ev.Closed() if self.phase is not LinkPhase.OVER:
                self._take_step(LinkStep.END)

    def _take_step(self, step: LinkStep) -> None:
        self.phase = next_phase(LINK_TRANSITIONS, self.phase, step)
        if self.phase is LinkPhase.OVER:
            self._stop_connecting()
            self._deadlines.cancel()

    def _on_deadline(self, deadline: Deadline, now: Now) -> None:
        match deadline:
            case due.JoinTimeoutOver():
                self._give_up()
            case due.NoAnswerNoticeDue():
                self._report_problem()
            case due.RetryDue():
                self._resolve()
            case due.StepLate(problem=problem):
                self._retry(problem.format(where=self.address), now)
            case due.NextAddressDue(number=number) if number in self._connecting:
                self._try_next_address(now)
            case due.StartErrorDue() if self._start_error is not None:
                self._end_with_usage_error(self._start_error.message, self._start_error.hint)

    # ------------------------------------------------------------------------------------------------------ connecting

    def _resolve(self) -> None:
        self._take_step(LinkStep.RESOLVE)
        self._do(do.Resolve())

    def _on_resolved(self, resolved: ev.Resolved, now: Now) -> None:
        if resolved.error in (socket.EAI_AGAIN, socket.EAI_SYSTEM):
            return self._retry(f"the name server does not answer for {self._config.address}", now)
        if resolved.error is not None:
            return self._retry(f"{self._config.address} does not resolve yet", now)
        self._take_step(LinkStep.CONNECT)
        self._addresses = [*resolved.addresses]
        self._set_step_timeout(CONNECT_TIMEOUT_S, "{where} does not answer: does a firewall block it?", now)
        self._try_next_address(now)

    def _try_next_address(self, now: Now) -> None:
        """Try the next address, and soon another in parallel; the first connection wins (Happy Eyeballs, RFC 8305)."""
        if not self._addresses:
            return None if self._connecting else self._retry(self._problem, now)
        self._next_number += 1
        self._connecting.append(self._next_number)
        self._do(do.Connect(self._next_number, self._addresses.pop(0)))
        if self._addresses:
            self._deadlines.set(due.NextAddressDue(self._next_number), now.mono + NEXT_ADDRESS_DELAY_S)

    def _on_connect_failed(self, failed: ev.ConnectFailed, now: Now) -> None:
        self._connecting.remove(failed.number)
        self._deadlines.cancel(due.NextAddressDue(failed.number))
        if failed.code is not None:
            host = self._config.address
            here = f" ({host} is this machine)" if host == "localhost" else ""
            self._problem = f"{self.address}: {os.strerror(failed.code).lower()}{here}"
        if failed.at_once or not self._connecting:
            self._try_next_address(now)

    def _on_connected(self, connected: ev.Connected, now: Now) -> None:
        self._connecting.remove(connected.number)
        self._nonce = connected.nonce
        self._stop_connecting()
        self._take_step(LinkStep.GREET)
        self._set_step_timeout(WELCOME_TIMEOUT_S, NOT_NODE_ZERO_ERROR, now)

    def _set_step_timeout(self, seconds: float, problem: str, now: Now) -> None:
        self._deadlines.cancel_all(due.StepLate)
        self._deadlines.set(due.StepLate(problem), now.mono + seconds)

    def _stop_connecting(self) -> None:
        """Close the sockets that are not connected yet, and cancel their deadlines; keep an open connection."""
        self._connecting.clear()
        self._deadlines.cancel_all(due.NextAddressDue)
        self._deadlines.cancel_all(due.StepLate)
        self._do(do.StopConnecting())

    def _retry(self, problem: str, now: Now) -> None:
        self._stop_connecting()
        self._do(do.Disconnect())
        self._take_step(LinkStep.RETRY)
        self._problem = problem
        if now.mono - self._began_at > FIRST_NOTICE_S:
            self._report_problem()
        delay_s = RETRY_DELAYS_S[min(self._retries, len(RETRY_DELAYS_S) - 1)]
        self._deadlines.set(due.RetryDue(), now.mono + delay_s)
        self._retries += 1

    def _report_problem(self) -> None:
        if self._seeks_node_zero:
            self._do(do.Deliver(messages.ConnectingToNodeZero(self._problem)))

    def _give_up(self) -> None:
        why = (
            f"node 0 was not reached in {self._options[Connections].join_timeout:g} s (--join-timeout): {self._problem}"
        )
        with_rank = " with --node-rank 0" if isinstance(self._hello, NodeHello) and self._hello.has_node_rank else ""
        hint = f"is the same command running there{with_rank}, and is the port open from here?"
        self._finish(JobResult(EXIT_UNAVAILABLE, remark=f"{why}\n  {hint}"))

    # --------------------------------------------------------------------------------------------- messages of node 0

    def _on_message(self, message: Message, now: Now) -> None:
        match self.phase:
            case LinkPhase.GREETING:
                assert isinstance(message, messages.Welcome)
                self._on_welcome(message, now)
            case LinkPhase.ASKING:
                self._on_join_reply(message)
            case LinkPhase.JOINED:
                self._on_joined_message(message)

    def _on_welcome(self, message: messages.Welcome, now: Now) -> None:
        if message.ddplaunch != PROTOCOL_VERSION:
            spoken = f"it speaks protocol {message.ddplaunch}, this one {PROTOCOL_VERSION}"
            why = f"node 0 runs another version of ddplaunch: {spoken}"
            return self._end_with_usage_error(why, "install the same version on every node")
        self._take_step(LinkStep.ASK)
        self._nonces = (message.nonce, self._nonce)
        token = self._options[Nodes].token
        proven = token_auth.compute_proof(token, token_auth.ROLE_MEMBER, self._nonces) if token else None
        self._do(do.AwaitReply(), do.Send(0, replace(self._hello, nonce=self._nonce, proof=proven)))
        self._set_step_timeout(WELCOME_TIMEOUT_S, "node 0 at {where} did not complete the handshake", now)

    def _on_join_reply(self, message: Message) -> None:
        if isinstance(message, messages.JoinRefused):
            return self._end_with_usage_error(message.message, message.hint)
        assert isinstance(message, messages.JoinAccepted)
        if isinstance(self._hello, JoinDeclined):
            raise ProtocolError("a JoinAccepted for a node that declined")
        given = message.node_rank
        if given is not None and (self._hello.has_node_rank or not 0 < given < self._config.max_nodes):
            raise ProtocolError("a node rank that this node cannot have")
        token = self._options[Nodes].token
        if token and not token_auth.verify_proof(message.proof, token, token_auth.ROLE_NODE_ZERO, self._nonces):
            return self._end_with_usage_error(
                f"node 0 at {self.address} does not know the token", "give every node the same --token"
            )
        self._stop_connecting()
        if given is not None:  # should node 0 restart before the first attempt, prefer the same node rank
            self._hello = replace(self._hello, node_spec=replace(self._hello.node_spec, node_rank=given))
        self._take_step(LinkStep.JOIN)
        self._deadlines.cancel(due.JoinTimeoutOver())
        self._retries = 0
        self._do(do.BeginHeartbeats(message.heartbeat_timeout_s))
        self._do(do.Deliver(message) if self._start_error is None else do.Send(0, self._start_error))

    def _on_joined_message(self, message: Message) -> None:
        match message:
            case messages.JoinStatus() if self._latest >= 0:
                raise ProtocolError("a JoinStatus after the start")
            case messages.EndJob():
                self._take_step(LinkStep.END)
            case StartAttempt():
                self._validate_start(message)
                self._attempt = self._latest = message.attempt
                self._has_begun = True
            case messages.AttemptMessage() if not isinstance(message, messages.CheckRequest):
                self._has_begun = True
        self._do(do.Deliver(message))

    def _validate_start(self, order: StartAttempt) -> None:
        """Raise ProtocolError unless this starts a new attempt and the assignment fits this node's ranks."""
        assert isinstance(self._hello, NodeHello)
        if self._attempt is not None or order.attempt <= self._latest:
            raise ProtocolError("a start out of turn")
        place, share = order.assignment, self._hello.node_spec
        if place is None or order.node_specs or not place.nnodes <= self._config.max_nodes:
            raise ProtocolError("a start without this node")
        if not (0 < place.node_rank < place.nnodes and place.node_rank <= place.first_rank):
            raise ProtocolError("a start at another node's place")
        if place.first_rank + len(share.devices) > place.world_size:
            raise ProtocolError("a start with other ranks than this node's")

    # ------------------------------------------------------------------------------------------ messages of this node

    def _on_message_posted(self, message: Message, now: Now) -> None:
        """Send a message of this node to node 0; while node 0 is not connected, act on the message locally."""
        wants_to_leave = isinstance(message, messages.StopRequested)
        is_repeated = isinstance(message, messages.StopRequested) and message.again
        if isinstance(message, messages.StopRequested):
            self._stop_signal = message.signal
        if isinstance(message, messages.AttemptReport) and message.attempt == self._attempt:
            self._attempt = None
        # After the hello node 0 may count this node as joined, and expects the reason for leaving.
        if self.phase is LinkPhase.JOINED or (self.phase is LinkPhase.ASKING and wants_to_leave):
            self._do(do.Send(0, message))
        if isinstance(message, messages.ForwardSignal):
            return  # does not change the state of this node
        if isinstance(message, messages.PreemptionNotice) and self._seeks_node_zero:
            name = signal_name(message.signal)
            return self._finish(JobResult(EXIT_PREEMPTED, remark=f"preempted by {name}: no rank was running"))
        if isinstance(message, messages.NodeStartError) and self._seeks_node_zero:
            self._start_error = message  # sent after joining, so that the other nodes learn it too
            self._deadlines.set(due.StartErrorDue(), now.mono + DECLINE_TIMEOUT_S)
        # Without ranks here, leave at once on a stop request. But node 0 decides how an attempt ended, whatever else is
        # sent to it meanwhile: another node may have got a signal earlier. On a node with programs only, node 0 also
        # decides when they end, unless the request is a second one.
        runs_only_programs = self._has_begun and self._latest < 0
        may_leave = wants_to_leave and (is_repeated or not runs_only_programs)
        if self._attempt is None and (may_leave or self.phase is LinkPhase.ORPHANED):
            self._end_without_coordinator()

    # -------------------------------------------------------------------------------------------------- loss and end

    def _on_lost(self, why: str, now: Now) -> None:
        """Called when node 0 is lost: before the first attempt connect again, else stop the ranks and end."""
        if self._seeks_node_zero:
            closed = "closed" in why or "broke" in why
            return self._retry((CLOSED_ERROR if closed else NOT_NODE_ZERO_ERROR).format(where=self.address), now)
        self._do(do.Disconnect())
        if self.phase is not LinkPhase.JOINED:
            return
        if not self._has_begun:
            self._deadlines.set(due.JoinTimeoutOver(), now.mono + self._options[Connections].join_timeout)
            return self._retry(f"node 0 at {self.address} was lost: {why}", now)
        self._take_step(LinkStep.ORPHAN)
        self._why_lost = f"node 0 ({self._config.address}) was lost: {why}"
        if self._attempt is None:
            return self._end_without_coordinator()
        stop = StopAttempt(self._attempt, signal.SIGTERM, self._options[Stopping].grace)
        note = messages.NoteMessage(f"{self._why_lost}; stopping the ranks here")
        self._do(do.Deliver(messages.CoordinatorLost()), do.Deliver(note), do.Deliver(stop))

    def _end_with_usage_error(self, message: str, hint: str | None) -> None:
        self._finish(JobResult(EXIT_USAGE, usage_error=(message, hint)))

    def _end_without_coordinator(self) -> None:
        lost = JobResult(EXIT_UNAVAILABLE, remark=self._why_lost)
        self._finish(lost if self._stop_signal is None else JobResult(EXIT_SIGNAL + self._stop_signal))

    def _finish(self, outcome: JobResult) -> None:
        if self.phase is not LinkPhase.OVER:
            self._take_step(LinkStep.END)
            self._do(do.Deliver(messages.CoordinatorLost()), do.Deliver(messages.EndJob(outcome)))
