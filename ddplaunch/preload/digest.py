"""A cryptographic digest without OpenSSL, which takes longer to load than most of what a start needs."""

from __future__ import annotations

from _blake2 import blake2b


def digest(data: bytes) -> str:
    """Return the digest (BLAKE2b, RFC 7693) in 64 hexadecimal digits."""
    found: str = blake2b(data, digest_size=32).hexdigest()
    return found
