"""Which failures may pass by themselves: what killed a rank, or cut it off, and not what its program did."""

from __future__ import annotations

import re

from ddplaunch import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.control.failure import Failure

_NETWORK = (
    r"^(?:\w+\.)*(?:DistBackendError|DistNetworkError|DistStoreError|Connection(?:Reset|Aborted)Error)\b"
    r"|Connection (?:reset|closed) by peer|ncclRemoteError|ncclSystemError|unhandled system error"
    r"|remote process exited or there was a network error"
)
"""Exceptions of torch.distributed and Python, and words of gloo and NCCL.

Source: torch/csrc/distributed/c10d/NCCLUtils.cpp (getNcclErrorDetailStr), ncclGetErrorString, gloo/transport/tcp.
"""

_KILLED = r"(?i)\) is killed by signal: |out-of-memory killer"
"""A worker of a DataLoader (torch/utils/data/_utils/signal_handling.py), and what ``Memory.hint`` adds."""


def is_transient(failure: Failure) -> bool:
    """Whether a rank ended by a signal, by the host's want of memory, or by an error of the network."""
    if failure.signal is not None:
        return True
    said = f"{failure.message or ''}\n{failure.hint or ''}"
    return bool(re.search(_NETWORK, said) or re.search(_KILLED, said))
