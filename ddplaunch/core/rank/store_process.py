"""The process that serves the job's store (torch's TCPStore) for one attempt: a fork of the zygote, which has torch."""

from __future__ import annotations

import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn


def can_serve_store(modules: Mapping[str, Any]) -> bool:
    """Whether a fork of this process, which has these modules, can serve a store."""
    dist = modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available())


def serve_store(listening: int) -> NoReturn:
    """Serve a new store on a listening socket until this process is killed."""
    with socket.socket(fileno=listening) as listener:
        address, port = listener.getsockname()[:2]
        listener.detach()
    version = tuple(int(part) for part in sys.modules["torch"].__version__.split(".")[:2])
    _store = sys.modules["torch.distributed"].TCPStore(
        address if address == "::1" else "127.0.0.1",  # for its own client: a host name may resolve differently here
        port,
        None,
        True,
        wait_for_workers=False,
        master_listen_fd=listening,
        use_libuv=version >= (2, 8),  # from 2.8 on, the libuv server accepts a listening socket, too
    )
    while True:
        signal.pause()
