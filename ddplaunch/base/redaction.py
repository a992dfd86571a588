"""Removes secrets from recorded command lines: values of options like --api-key, and words that look like keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

HIDDEN = "…"

# Patterns are compiled on use, when the ranks run: the file is imported at the start.

_PASSWORDS = {"password", "passwd", "passphrase", "secret", "credentials"}
_KEYS = {"token", "apikey"}
_BEFORE_KEY = {"api", "access", "auth", "private", "secret", "account"}  # "key" alone may be anything: --sort-key

_KEY_VALUE = r"(?!\d+$)[\w./+=:-]{6,}"
"""A value of --token that may be a secret: not a number, nor "<pad>" or "[MASK]" of a tokenizer."""

_SECRET_VALUE = (
    r"(hf_|gh[opsur]_|github_pat_|glpat-|sk-|xox[abeprs]-|AKIA|ASIA|AIza)[\w-]{16,}"  # of services, by their prefixes
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"  # a JSON web token
)
_URL_PASSWORD = r"(?<=://)([^/@\s:]*):[^/@\s]+(?=@)"


def redacted_argv() -> tuple[str, ...]:
    """Return the command line of this process for a record, with HIDDEN in place of secrets."""
    return ("ddplaunch", *redact_words(sys.argv[1:]))


def redact_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with HIDDEN in place of secrets."""
    redacted: list[str] = []
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if before.startswith("-") and "=" not in before and _is_secret(before, word):
            redacted.append(HIDDEN)
        elif equals and _is_secret(name, value):
            redacted.append(f"{name}={HIDDEN}")
        else:
            redacted.append(re.sub(_URL_PASSWORD, rf"\1:{HIDDEN}", re.sub(_SECRET_VALUE, HIDDEN, word)))
        before = word
    return redacted


def _is_secret(name: str, value: str) -> bool:
    """Whether ``value`` is a secret, judged by the name of its option or setting: --api-key, HF_TOKEN."""
    parts = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if part]
    if not parts or not value or value.startswith("--"):
        return False
    if parts[-1] in _PASSWORDS or name == "--token":
        return True
    is_key = parts[-1] in _KEYS or (parts[-1] == "key" and len(parts) > 1 and parts[-2] in _BEFORE_KEY)
    return is_key and bool(re.fullmatch(_KEY_VALUE, value))
