"""The keyword arguments of ``launch`` and ``Session``, for type checkers: the options of ``ddplaunch run``.

``python -m tests.reference`` writes this file. Values are as on the command line: ``timeout="10m"`` or 600,
``nproc=4`` or "auto".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

Text = str | int | float
Texts = str | Sequence[str]
Variables = Mapping[str, str] | Texts


class Keywords(TypedDict, total=False):
    """The options of ``ddplaunch run``, except those about a terminal or the target."""

    nproc: Text | None
    gpus: Text | None
    oversubscribe: bool
    virtual_local_rank: bool
    bind: str | None
    wait: Text | None
    jobs: Text | None
    nnodes: Text
    node_rank: Text | None
    master_addr: Text | None
    master_port: Text | None
    domain: Text | None
    node_order: str
    segment: Text | None
    interface: Text | None
    cluster: Text | None
    run_id: Text | None
    name: Text | None
    token: Text | None
    hosts: Text | None
    hostfile: Text | None
    include: Text | None
    exclude: Text | None
    env: Variables
    remote_python: Text | None
    code: Text | None
    control: str
    control_port: Text | None
    join_timeout: Text
    heartbeat_timeout: Text
    allow_mismatch: bool
    spares: Text
    join_window: Text
    max_membership_changes: Text
    grow: bool
    backend: Text | None
    init_method: Text | None
    start: str
    nice: Text
    preload: Text | None
    warm: bool | None
    check: bool
    gpu_memory_timeout: Text | None
    role: Text
    grace: Text
    max_restarts: Text
    restart_on: Text
    restart_backoff: Text
    min_uptime: Text
    checkpoint: Text | None
    timeout: Text | None
    stall_timeout: Text | None
    on_stall: str | None
    straggler_timeout: Text | None
    preempt_signal: Text | None
    preempt_grace: Text
    preempt_forward: Text | None
    tensorboard: Text | None
    sidecar: Texts
    services: Text | None
    mains_timeout: Text | None
    notify: Texts
    metrics: Text | None
    debug: bool
    debug_timeout: Text
    post_mortem: bool
    debugpy: Text | None
    oom_report: bool
    torch_debug: bool
    show: Text
    prefix: Text
    merge: bool | None
    log_dir: Text | None
    no_history: bool
    no_inspect: bool
    no_config: bool
