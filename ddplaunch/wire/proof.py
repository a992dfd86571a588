"""That a peer knows the job's token, without the token ever being sent: HMAC-SHA256 over both sides' nonces.

It keeps out peers that do not know the token; later messages are neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os

# Who proves: one side's proof is not good for the other's.
MEMBER = "member"
NODE_ZERO = "node zero"


def nonce() -> str:
    """Return 16 random bytes as text."""
    return os.urandom(16).hex()


def prove(token: str, who: str, nonces: tuple[str, str]) -> str:
    """Return the proof of ``who``; ``nonces`` are node 0's and the other's."""
    key, said = token.encode(errors="surrogateescape"), "\n".join((who, *nonces)).encode()
    return hmac.new(key, said, hashlib.sha256).hexdigest()


def proves(proof: str | None, token: str, who: str, nonces: tuple[str, str]) -> bool:
    """Whether ``proof`` is that of ``who``; takes equally long whatever is wrong with it."""
    return hmac.compare_digest((proof or "").encode(), prove(token, who, nonces).encode())
