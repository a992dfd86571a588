"""That a peer knows the job's token, without the token ever being sent: HMAC-SHA256 over both sides' nonces.

It keeps out peers that do not know the token; later messages are neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os

# Who proves: one side's proof is not good for the other's.
ROLE_MEMBER = "member"
ROLE_NODE_ZERO = "node zero"


def new_nonce() -> str:
    """Return 16 random bytes as text."""
    return os.urandom(16).hex()


def compute_proof(token: str, role: str, nonces: tuple[str, str]) -> str:
    """Return the proof of ``role``; ``nonces`` are node 0's and the other's."""
    key, said = token.encode(errors="surrogateescape"), "\n".join((role, *nonces)).encode()
    return hmac.new(key, said, hashlib.sha256).hexdigest()


def verify_proof(proof: str | None, token: str, role: str, nonces: tuple[str, str]) -> bool:
    """Whether ``proof`` is that of ``role``; takes equally long whatever is wrong with it."""
    return hmac.compare_digest((proof or "").encode(), compute_proof(token, role, nonces).encode())
