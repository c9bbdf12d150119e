"""Paper backup of a key: its 32-byte seed as 24 words (BIP-39, English).

BIP-39's 8-bit checksum detects 255 of 256 slips. The remaining one gives another key: compare the node ids. No message
quotes a word, and no error has one in its chain of causes.
"""

from __future__ import annotations

import functools

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from mnemonic import Mnemonic

from node.errors import IdentityError

WORDS = 24
MAX_PHRASE_BYTES = 4096


def phrase_of(key: Ed25519PrivateKey) -> str:
    """Return the 24 words of `key`; whoever reads them has the key."""
    return _bip39().to_mnemonic(key.private_bytes_raw())


def key_of(phrase: str) -> Ed25519PrivateKey:
    """Return the key of 24 words; case and white space do not matter. Raises IdentityError, `bad_phrase`."""
    words = phrase.lower().split()
    if len(words) != WORDS:
        raise IdentityError(f"A key's phrase has {WORDS} words, and this has {len(words)}.", code="bad_phrase")
    known = frozenset(_bip39().wordlist)
    unknown = [str(position) for position, word in enumerate(words, 1) if word not in known]
    if unknown:
        raise IdentityError(
            f"Not in BIP-39's list of words: number {', '.join(unknown)} of the phrase; look for slips.",
            code="bad_phrase",
        )
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes(_bip39().to_entropy(words)))
    except ValueError:
        raise IdentityError(
            "The phrase's checksum does not fit: a word is another one, or the order is.", code="bad_phrase"
        ) from None


def decode_phrase(data: bytes) -> str:
    """Decode the content of a phrase file; raises IdentityError, `bad_phrase`, if it is too long or not UTF-8."""
    try:
        if len(data) <= MAX_PHRASE_BYTES:
            return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass  # the exception holds the phrase
    raise IdentityError(f"That is not a key's phrase: {WORDS} words in UTF-8, nothing else.", code="bad_phrase")


@functools.cache
def _bip39() -> Mnemonic:
    return Mnemonic("english")
