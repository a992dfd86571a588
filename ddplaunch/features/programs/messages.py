"""The messages between node 0 and the other nodes about the programs of a job."""

from __future__ import annotations

from msgspec import Struct

from ddplaunch.base.types import Count, ExitCode, Name, RunId, Signal, TailLines, TextLine
from ddplaunch.core.messages import AttemptMessage, CheckRequest, FeatureMessage, FromNode, FromNodeZero


class HoldPorts(CheckRequest, FromNodeZero, frozen=True):
    """Request to hold the ports of a node's programs: the replies are ``PortsHeld`` and, later, ``CheckPassed``."""


class HeldAddress(Struct, frozen=True):
    """The address of a port of a program."""

    program: Name
    port: Name  # the name of the port; "" for the one without a name
    host: Name
    number: Count


class PortsHeld(FeatureMessage, FromNode, frozen=True):
    """Reply to ``HoldPorts``: the ports that this node holds for its programs."""

    attempt: Count
    addresses: tuple[HeldAddress, ...]


class StartPrograms(AttemptMessage, FromNodeZero, frozen=True):
    """Request to start the programs of a node, with the addresses of all programs of the job."""

    addresses: tuple[HeldAddress, ...]
    run_id: RunId


class ProgramIsReady(FeatureMessage, FromNode, frozen=True):
    attempt: Count
    name: Name


class ReadyPrograms(AttemptMessage, FromNodeZero, frozen=True):
    """Programs that are ready, of all nodes."""

    names: tuple[Name, ...]


class ProgramFailed(FeatureMessage, FromNode, frozen=True):
    """A program of this node has failed: the exit code of the job, why, and the last lines of the program."""

    attempt: Count
    code: ExitCode
    reason: TextLine
    tail: TailLines = ()


class StopMains(AttemptMessage, FromNodeZero, frozen=True):
    """Request to stop the mains of a node with the signal that stopped the ranks; its services go on for now."""

    signal: Signal


class MainEnded(FeatureMessage, FromNode, frozen=True):
    """A main of this node has failed, was stopped, or is not started any more."""

    attempt: Count
    name: Name


class MainDone(FeatureMessage, FromNode, frozen=True):
    """A main of this node has ended with 0."""

    attempt: Count
    name: Name
