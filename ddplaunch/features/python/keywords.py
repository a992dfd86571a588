"""The keyword arguments of ``launch`` and ``Session``, for type checkers: the options of ``ddplaunch run``.

A test keeps them equal to the options. Values are as on the command line: ``timeout="10m"`` or 600, ``nproc=4`` or
"auto".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

Text = str | int | float
Texts = str | Sequence[str]


class Keywords(TypedDict, total=False):
    """The options of ``ddplaunch run``, except those about a terminal or the target."""

    nproc: str | int | None
    gpus: Text | None
    oversubscribe: bool
    virtual_local_rank: bool
    bind: str | None
    cluster: str | None
    nnodes: str | int
    node_rank: str | int | None
    master_addr: str | None
    master_port: int | None
    interface: str | None
    run_id: str | None
    token: str | None
    hosts: str | None
    hostfile: str | None
    include: str | None
    exclude: str | None
    env: Mapping[str, str] | Texts
    remote_python: str | None
    control: str
    control_port: int | None
    join_timeout: Text
    heartbeat_timeout: Text
    allow_mismatch: bool
    spares: int
    join_window: Text
    max_membership_changes: int
    grow: bool
    backend: str | None
    init_method: str | None
    start: str
    preload: str | None
    warm: bool | None
    check: bool
    gpu_memory_timeout: Text | None
    role: str
    grace: Text
    max_restarts: int
    restart_on: str
    restart_backoff: Text
    min_uptime: Text
    checkpoint: str | None
    timeout: Text | None
    stall_timeout: Text | None
    on_stall: str | None
    straggler_timeout: Text | None
    preempt_signal: str | int | None
    preempt_grace: Text
    preempt_forward: str | int | None
    tensorboard: str | None
    sidecar: Texts
    notify: Texts
    metrics: str | None
    debug: bool
    debug_timeout: Text
    post_mortem: bool
    debugpy: str | None
    oom_report: bool
    show: str
    prefix: str
    merge: bool | None
    log_dir: str | None
    no_history: bool
    no_inspect: bool
    no_config: bool
