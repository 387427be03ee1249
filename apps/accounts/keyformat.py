"""Making, splitting and hashing key secrets; no Django here."""

from __future__ import annotations

import hashlib
import secrets
import string

KEY_START = "sk-sluice-"
PREFIX_LENGTH = 8
SECRET_LENGTH = 43
KEY_LENGTH = len(KEY_START) + PREFIX_LENGTH + 1 + SECRET_LENGTH
PREFIX_ALPHABET = string.ascii_lowercase + string.digits
SECRET_ALPHABET = string.ascii_letters + string.digits


def new_prefix() -> str:
    return "".join(secrets.choice(PREFIX_ALPHABET) for _ in range(PREFIX_LENGTH))


def new_secret() -> str:
    """43 letters and digits: 256 random bits."""
    return "".join(secrets.choice(SECRET_ALPHABET) for _ in range(SECRET_LENGTH))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def split_key(key: str) -> str | None:
    """The prefix of a well-formed key; ``None`` for anything else.

    Looks at the shape only, so that nonsense of any length costs no query.
    """
    if len(key) != KEY_LENGTH or not key.startswith(KEY_START) or not key.isascii():
        return None
    prefix, sep, secret = key[len(KEY_START) :].partition("-")
    if not sep or len(prefix) != PREFIX_LENGTH or not secret.isalnum():
        return None
    return prefix
