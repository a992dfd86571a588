"""The process with the web pages of torch.distributed.debug, which asks the ranks through the job's store.

It prints its port, and ends when its stdin ends. torch's own server listens on all addresses, for anyone; this one
listens on 127.0.0.1 only.
"""

from __future__ import annotations

import os
import socket
import sys
from threading import Thread

HOST = "127.0.0.1"


def main() -> None:
    """Serve the debug pages until stdin ends."""
    Thread(target=_end_with_stdin, daemon=True).start()
    import torch.distributed.debug._frontend as pages
    from torch.distributed.debug._debug_handlers import default_handlers

    class LoopbackServer(pages._IPv6HTTPServer):  # type: ignore[misc, unused-ignore]
        address_family = socket.AF_INET

        def __init__(self, address: tuple[str, int], handler: type) -> None:
            super().__init__((HOST, address[1]), handler)

    pages._IPv6HTTPServer = LoopbackServer  # type: ignore[misc, unused-ignore]
    server = pages.FrontendServer(0, default_handlers())
    address = server._server.server_address
    if address[0] != HOST:
        sys.exit(f"this torch would listen on {address[0]}: --torch-debug does not know it")
    print("port", address[1], flush=True)
    server.join()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)
