"""Token proofs (challenge-response): HMAC-SHA256 over both sides' nonces proves that a peer knows the job's token.

The token itself is never sent. Later messages are neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os

# The role is part of the proof, so that a peer cannot send the other side's proof back.
ROLE_MEMBER = "member"
ROLE_NODE_ZERO = "node zero"


def new_nonce() -> str:
    """Return 16 random bytes as text."""
    return os.urandom(16).hex()


def compute_proof(token: str, role: str, nonces: tuple[str, str]) -> str:
    """Return the proof of ``role``; ``nonces``: node 0's, then the other node's."""
    key, text = token.encode(errors="surrogateescape"), "\n".join((role, *nonces)).encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def verify_proof(proof: str | None, token: str, role: str, nonces: tuple[str, str]) -> bool:
    """Whether ``proof`` is that of ``role``; compares in constant time."""
    return hmac.compare_digest((proof or "").encode(), compute_proof(token, role, nonces).encode())
