"""Types of the JSON messages between launcher, warm zygote and guardian.

Imported for type checking only, as ``core/rank/zygote_messages.py`` is.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from ddplaunch.core.rank.zygote_messages import ZygoteConfig


class WarmEndpoint(TypedDict):
    """Socket, lifetime and inherited descriptors of a warm zygote."""

    listening_fd: int  # socket for launchers
    path: str  # of the socket
    reserved_fds: list[int]  # placeholders at the descriptor numbers that the first run will use
    session_leader: tuple[int, int]  # the process with which it ends: pid and start time (``proc_utils.start_ticks``)
    leader_pidfd: int | None  # None if the kernel has no pidfds
    idle_timeout_s: float  # lifetime without a run


class WarmOrder(TypedDict):
    """The run that a launcher requests a zygote for; sent in a memfd, because the environment may be long."""

    config: ZygoteConfig
    environment: dict[str, str]
    fingerprint: dict[str, str]
    fd_numbers: list[int]  # target numbers of the launcher's descriptors: 0, 1, 2 and other inherited ones


class ToWarm(TypedDict):
    """A request to a warm zygote, or to a run's zygote.

    ``run``: fork a zygote; attached are the order, the zygote's control socket, the guardian's socket to the launcher.
    That socket gets "declined" with a reason, or "zygote_offer" with the zygote's pid, whose pidfd is attached.
    ``fd_handover``: the launcher's descriptors are attached. ``stop``: exit after the current runs; as for ``status``,
    the reply is a ``WarmStatus``.
    """

    op: Literal["run", "fd_handover", "status", "stop"]


class WarmStatus(TypedDict):
    """Status of a warm zygote."""

    op: Literal["warm_status"]
    pid: int
    started_at: float  # seconds since the epoch
    remaining_s: float | None  # seconds until it exits; None while a run uses it
    current_runs: int
    runs_served: int  # all runs so far
    modules: list[str]
    working_dir: str  # of the warm zygote and its runs
    is_ending: bool


class GuardianExited(TypedDict):
    """All processes of a guardian's run have ended, except the ``stuck`` ones."""

    op: Literal["guardian_exited"]
    status: int  # wait status of the run's zygote
    stuck: list[str]
