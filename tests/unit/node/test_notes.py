"""Signed notes, against the published vectors of others: what a log elsewhere signs, and what hostile ones send."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.protocol.checkpoints import (
    MAX_ADD_BYTES,
    MAX_SUBMITTED_HASHES,
    AddCheckpoint,
    Checkpoint,
    log_key,
    open_checkpoint,
    open_witnessed,
    origin_of,
    parse_add_checkpoint,
    parse_checkpoint,
    seal_checkpoint,
)
from node.protocol.notes import (
    MAX_NOTE_BYTES,
    MAX_SIGNATURES,
    KeyKind,
    cosign_text,
    join_note,
    parse_key,
    parse_note,
    sign_text,
)
from node.protocol.run import run_id_of
from shardcast.errors import BadSignature, Malformed, PeerFault

EXAMPLES = {
    "example.com/foo+530d903a+AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k": """This is an example message.

— example.com/foo Uw2QOkn8srV1yJGh2VYRlL1Tnagv1YEq6TfXppzi2ONncAlTgK7Ztg1ERYNZXsYjOBH3mFXmRKuwHjG1Yu72IneyaQM=
""",
    "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW": """\
If you think cryptography is the answer to your problem,
then you don't know what your problem is.

— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=
""",
}
"""The examples of c2sp.org/signed-note and of Go's checksum database, by the keys that verify them."""

PUBLIC = """arche2025h1.staging.ct.transparency.dev
1432088532
U7WM79jrzyhGZ5/GUBTpM7NzwdyfFx61t3RovgcC4Ro=

— arche2025h1.staging.ct.transparency.dev zTM8sQAAAZ5W0WdjBAMARjBEAiBjW5IQf9pvsYLfQFX6hoGREPMHbdQ3urbllzalApkptQIg\
IpwtEroeW2BXaHAI4kJXFbon5Ch9MNL5zRNZ55lvGt0=
— arche2025h1.staging.ct.transparency.dev ui8GwCF1+kWqZrxGdhj4aX3gcw7XUlXQQabg/27lefwhUkzbC3NygNI75MdhL1bfTW9g8Ei5\
9RA23oHP7Ry1k3ZFWwQ=
— transparency.dev/DEV:witness-little-garden 2AQqhwAAAABqEiEgzgFIqqhbUoDwjMWE6UP8nd8/KYTzwZ2rhIgcqoXHAwVkjZr4AscylP\
3v7sEodkRAErumC2q44vdgJY096st5BQ==
— remora.n621.de 2net5wAAAABqEiEgPlfF3V06o0Y+fHM+J5J9s27wgxxcOVSpZ/2g/KSiXCg9DEZI+aVCIobWX9sXTynk5XeU/zZ0WBxtqB0DrA\
WfBw==
"""
PUBLIC_LOG = "arche2025h1.staging.ct.transparency.dev+ba2f06c0+AU0vHmlGCS/PdN8b2OaGmKprLI8HKM+dJ472xgFYh15f"
PUBLIC_WITNESS = "remora.n621.de+da77ade7+BOvN63jn/bLvkieywe8R6UYAtVtNbZpXh34x7onlmtw2"
"""A checkpoint of a public log of certificates, which public witnesses have signed."""

KEY, OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32)), Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
RUN = run_id_of(PUBLIC_KEY)
SEEN = Checkpoint(origin_of(RUN), 23, bytes(range(32)))
NOTE = seal_checkpoint(SEEN, key=KEY)


@pytest.mark.parametrize("vkey", EXAMPLES)
def test_the_examples_of_others_verify_and_no_other_text_does(vkey: str) -> None:
    key, data = parse_key(vkey, KeyKind.LOG), EXAMPLES[vkey].encode()
    assert str(key) == vkey
    note = parse_note(data)
    assert list(note.verify([key])) == [key]
    assert note.encode() == data
    with pytest.raises(BadSignature):
        parse_note(data.replace(b"is", b"Is", 1)).verify([key])


def test_a_public_logs_checkpoint_and_its_public_witness_verify() -> None:
    """Beside them stand another kind of signature of the log's own name, and witnesses that nobody asked for."""
    log, witness = parse_key(PUBLIC_LOG, KeyKind.LOG), parse_key(PUBLIC_WITNESS, KeyKind.WITNESS)
    opened = open_witnessed(PUBLIC.encode(), log=log, witnesses=[witness])
    assert opened.checkpoint.size == 1432088532
    assert opened.witnesses == {witness: 1779573024}
    with pytest.raises(BadSignature):
        open_witnessed(PUBLIC.replace("1432088532", "1432088533").encode(), log=log)
    later = PUBLIC.replace("2net5wAAAABqEiEg", "2net5wAAAABqEiEh").encode()
    with pytest.raises(BadSignature):
        open_witnessed(later, log=log, witnesses=[witness])
    assert open_witnessed(later, log=log).checkpoint == opened.checkpoint, "not this reader's witness"


def test_a_witnesss_signature_is_none_of_a_log_with_the_same_key() -> None:
    name = SEEN.origin
    signed = [cosign_text(SEEN.text, name=name, key=KEY, at=5)]
    with pytest.raises(BadSignature, match="not signed by"):
        open_checkpoint(join_note(SEEN.text, signed), run_id=RUN, signer=PUBLIC_KEY)
    untimed = [cosign_text(SEEN.text, name="w", key=OTHER, at=0), *parse_note(NOTE).signatures]
    witness = parse_key("w+" + _id_and_key("w", OTHER), KeyKind.WITNESS)
    with pytest.raises(BadSignature):
        open_witnessed(join_note(SEEN.text, untimed), log=log_key(RUN, PUBLIC_KEY), witnesses=[witness])


def _id_and_key(name: str, key: Ed25519PrivateKey) -> str:
    from node.protocol.notes import VerifierKey

    return str(VerifierKey(name, KeyKind.WITNESS, key.public_key().public_bytes_raw())).partition("+")[2]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "malformed"),
        (NOTE[:-1], "malformed"),
        (NOTE.replace(b"\n\n", b"\n"), "malformed"),
        (NOTE.replace(b"\n23\n", b"\n23\r\n"), "malformed"),
        (NOTE.replace(b"\n23\n", b"\n\xff\n"), "malformed"),
        (NOTE + b"-- a 12345678\n", "malformed"),
        (NOTE + "— a+b MTIzNDU2Nzg=\n".encode(), "malformed"),
        (NOTE + "— a\u00a0b MTIzNDU2Nzg=\n".encode(), "malformed"),
        (NOTE + "— a MTIz\n".encode(), "malformed"),
        (NOTE + "— a MTIzNDU2Nzh=\n".encode(), "malformed"),
        (NOTE + "— a MTIzNDU2Nzg=\n".encode() * MAX_SIGNATURES, "oversized"),
        (b"x\n" * MAX_NOTE_BYTES, "oversized"),
        (seal_checkpoint(SEEN, key=OTHER), "wrong_signer"),
        (join_note(b"other\n1\n", [sign_text(b"other\n1\n", name=SEEN.origin, key=KEY)]), "malformed"),
    ],
)
def test_what_is_no_note_of_the_run_is_refused(data: bytes, code: str) -> None:
    with pytest.raises(PeerFault) as refused:
        open_checkpoint(data, run_id=RUN, signer=PUBLIC_KEY)
    assert refused.value.code == code


@pytest.mark.parametrize("size", ["", "01", "-1", "+1", "1 ", "٣", str(2**63), "9" * 4000])
def test_a_size_has_one_spelling(size: str) -> None:
    """Python's int() takes all of them: two texts of one checkpoint would have two signatures."""
    with pytest.raises(Malformed):
        parse_checkpoint(SEEN.text.replace(b"23", size.encode()))


@pytest.mark.parametrize(
    "vkey",
    [
        PUBLIC_WITNESS.replace("da77ade7", "da77ade8"),
        PUBLIC_WITNESS.replace("remora", "remorb"),
        PUBLIC_LOG,
        PUBLIC_WITNESS[:-1],
        "w+680f52bc+BAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "remora.n621.de",
        "+" * 1000,
    ],
)
def test_a_verifier_key_with_a_slip_is_refused(vkey: str) -> None:
    with pytest.raises(Malformed) as refused:
        parse_key(vkey, KeyKind.WITNESS)
    assert refused.value.code == "bad_vkey"


def test_a_request_to_a_witness_is_bounded_before_it_is_read() -> None:
    request = AddCheckpoint(6, (bytes(32),) * MAX_SUBMITTED_HASHES, NOTE)
    assert parse_add_checkpoint(request.encode()) == request
    assert parse_add_checkpoint(AddCheckpoint(0, (), NOTE).encode()).proof == ()
    for data in (
        AddCheckpoint(6, (bytes(32),) * (MAX_SUBMITTED_HASHES + 1), NOTE).encode(),
        AddCheckpoint(6, (bytes(31),), NOTE).encode(),
        b"old 06\n\n" + NOTE,
        b"new 6\n\n" + NOTE,
        b"old 6\n" + NOTE,
        b"old 6\n\xff\n\n" + NOTE,
        b"old 6\n\n" + b"x" * MAX_ADD_BYTES,
        b"",
    ):
        with pytest.raises(Malformed):
            parse_add_checkpoint(data)
