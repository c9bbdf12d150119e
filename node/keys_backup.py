"""A key's backup: the seed sealed in a file, and 12 words on paper that open it.

The words are 128 random bits and a checksum (BIP-39, English). scrypt (RFC 7914) makes the sealing key of the bits
and the file's salt; its cost is for whoever saw some of the words, since all of them together cannot be guessed.
ChaCha20-Poly1305 (RFC 8439) seals the seed and binds the header, in which the node's id is readable.

A backup is for one restoring person, not for peers, but the file may come from anywhere: its length and scrypt's cost
are limited before anything is derived. No message quotes a word or a seed, and no error has one in its chain of causes.
"""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path
from typing import Annotated, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from mnemonic import Mnemonic
from msgspec import Meta

from node.errors import IdentityError
from node.identity import node_id
from shardcast.errors import Malformed
from shardcast.files import read_bounded, sync_folder
from shardcast.wire import PublicKey, Wire, decode, encode

WORDS = 12
LOG2_N = 17  # 128 MiB, and 0.3 s on one core
MAX_LOG2_N = 18
MAX_BACKUP_BYTES = 1024
MAX_PHRASE_BYTES = 4096

_NONCE = bytes(12)  # each backup has a sealing key of its own, which seals once


class BackupHeader(Wire, frozen=True):
    """What is readable without the phrase: whose seed it is, and what scrypt needs besides the phrase."""

    format: Literal["veriswarm-key-backup/1"]
    node_id: PublicKey
    scrypt_log2_n: Annotated[int, Meta(ge=10, le=MAX_LOG2_N)]
    salt: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class KeyBackup(Wire, frozen=True):
    """The file's content; `sealed` is the 32-byte seed and the tag of 16 bytes, in hexadecimal."""

    header: BackupHeader
    sealed: Annotated[str, Meta(pattern=r"^[0-9a-f]{96}\Z")]


def seal(key: Ed25519PrivateKey, *, log2_n: int = LOG2_N) -> tuple[bytes, str]:
    """A new backup of `key`: the file's content, and the only phrase that opens it.

    scrypt takes 2**log2_n KiB of memory, and time in proportion.
    """
    entropy = secrets.token_bytes(16)
    header = BackupHeader(
        format="veriswarm-key-backup/1", node_id=node_id(key), scrypt_log2_n=log2_n, salt=secrets.token_hex(16)
    )
    sealed = _cipher(header, entropy).encrypt(_NONCE, key.private_bytes_raw(), encode(header))
    return encode(KeyBackup(header=header, sealed=sealed.hex())) + b"\n", _bip39().to_mnemonic(entropy)


def unseal(backup: KeyBackup, phrase: str) -> Ed25519PrivateKey:
    """The key in `backup`; raises IdentityError, `bad_phrase` or `wrong_phrase`, which also means a damaged file.

    Case and white space in `phrase` do not matter.
    """
    header = backup.header
    try:
        seed = _cipher(header, _entropy(phrase)).decrypt(_NONCE, bytes.fromhex(backup.sealed), encode(header))
    except InvalidTag:
        raise IdentityError(
            "The phrase does not open this backup: it is another backup's, or the file is damaged.",
            code="wrong_phrase",
        ) from None
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if node_id(key) != header.node_id:
        raise IdentityError(
            "The backup holds another node's key than it says; do not use it.",
            code="not_a_backup",
        )
    return key


def parse_backup(data: bytes) -> KeyBackup:
    """Read a backup file's content; raises IdentityError, `not_a_backup`."""
    try:
        return decode(KeyBackup, data.removesuffix(b"\n"), max_bytes=MAX_BACKUP_BYTES)
    except Malformed as error:
        raise IdentityError(  # which does not quote the file: it may hold escapes for the terminal
            "This is not a key's backup, or a damaged one, or of a newer version; use another copy.",
            code="not_a_backup",
        ) from error


def read_backup(path: Path) -> KeyBackup:
    """The backup in `path`; raises IdentityError, `backup_path` or `not_a_backup`."""
    try:
        return parse_backup(read_bounded(path, max_bytes=MAX_BACKUP_BYTES))
    except OSError as error:
        raise IdentityError(f"The backup {path} cannot be read: {error.strerror}.", code="backup_path") from error
    except Malformed as error:
        raise IdentityError(f"{path} is not a key's backup: it is too long.", code="not_a_backup") from error


def write_backup(path: Path, data: bytes) -> None:
    """Write a backup's content to `path`, mode 0600; raises IdentityError, `backup_exists` rather than replace a file.

    A folder that is missing is not made: it may be that of a disk that is not mounted.
    """
    _write_new(path, data, what="backup")


def restore_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Make the key file `path` again; raises IdentityError, `key_exists` rather than replace one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(path, error, what="key") from error
    _write_new(path, key.private_bytes_raw().hex().encode() + b"\n", what="key")


def check_absent(path: Path) -> None:
    """Raises IdentityError, `key_exists`, if something is in the place of the key file `path`."""
    if os.path.lexists(path):
        raise _exists(path, what="key")


def decode_phrase(data: bytes) -> str:
    """A phrase from a file or a pipe; raises IdentityError, `bad_phrase`, for what is too long or no text."""
    try:
        if len(data) <= MAX_PHRASE_BYTES:
            return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass  # the exception holds the phrase
    raise IdentityError(f"That is not a recovery phrase: {WORDS} words in UTF-8, nothing else.", code="bad_phrase")


def _entropy(phrase: str) -> bytes:
    """The 16 bytes that `phrase` stands for."""
    words = phrase.lower().split()
    if len(words) != WORDS:
        raise IdentityError(f"A recovery phrase has {WORDS} words, and this has {len(words)}.", code="bad_phrase")
    known = frozenset(_bip39().wordlist)
    unknown = [str(position) for position, word in enumerate(words, 1) if word not in known]
    if unknown:
        raise IdentityError(
            f"Not in BIP-39's list of words: number {', '.join(unknown)} of the phrase; look for slips.",
            code="bad_phrase",
        )
    try:
        return bytes(_bip39().to_entropy(words))
    except ValueError:
        raise IdentityError(
            "The phrase's checksum does not fit: a word is another one, or the order is.", code="bad_phrase"
        ) from None


def _cipher(header: BackupHeader, entropy: bytes) -> ChaCha20Poly1305:
    salt = bytes.fromhex(header.salt)
    return ChaCha20Poly1305(Scrypt(salt=salt, length=32, n=2**header.scrypt_log2_n, r=8, p=1).derive(entropy))


@functools.cache
def _bip39() -> Mnemonic:
    return Mnemonic("english")


def _write_new(path: Path, data: bytes, *, what: Literal["key", "backup"]) -> None:
    """Not by way of a temporary name: sticks with FAT have no hard links, and a rename would replace a file.

    A process that is killed here may leave a part, which no reader takes for a whole.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise _exists(path, what=what) from error
    except OSError as error:
        raise _not_written(path, error, what=what) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _not_written(path, error, what=what) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _exists(path: Path, *, what: str) -> IdentityError:
    return IdentityError(
        f"{path} exists already; a {what} is never replaced, name another file.", code=f"{what}_exists"
    )


def _not_written(path: Path, error: OSError, *, what: str) -> IdentityError:
    return IdentityError(f"The {what} {path} could not be written: {error.strerror}.", code=f"{what}_path")
