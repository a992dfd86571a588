"""Serves torch's state of one rank on 127.0.0.1: torch's worker server, from the import of torch.distributed on.

Its address is a key of the job's store, where ``frontend.py`` looks for it. A thread sets the key, as there may be
no store before ``init_process_group``. Rules for this file are in ``core/rank/rank_runner.py``.
"""

from __future__ import annotations

import _thread
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from ddplaunch.core.rank import inspection_endpoint
    from ddplaunch.core.rank.rank_runner import RankRunner, load_private_module
else:
    inspection_endpoint = load_private_module("core/rank/inspection_endpoint")


class Side:
    """The worker server of one rank."""

    def __init__(self, rank: RankRunner) -> None:
        self._server: Any = None

    def begin(self) -> None:
        inspection_endpoint.call_after_import("torch.distributed.distributed_c10d", "init_process_group", self._start)

    def leave(self) -> None:
        if self._server is not None:
            self._server.shutdown()

    def _start(self, module: ModuleType) -> None:
        _thread.start_new_thread(self._serve, ())

    def _serve(self) -> None:
        try:
            from torch._C._distributed_c10d import _WorkerServer
            from torch.distributed.debug._store import tcpstore_client

            self._server = _WorkerServer("127.0.0.1", 0)
            tcpstore_client().set(f"rank{os.environ['RANK']}", f"http://127.0.0.1:{self._server.port}")
        except Exception:
            pass  # the page of this rank is missing: its program has no store, or has ended
