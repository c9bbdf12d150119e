"""Submission files made to crash, stall, exhaust or deceive the verifier.

Whatever arrives, the reader returns rollouts or a Refusal, in bounded time and memory, and reads the next file.
"""

from __future__ import annotations

import io
import random
import struct
import subprocess
import sys
import textwrap
import time
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zstandard

from node.protocol.reasons import Reason, Refusal
from node.protocol.run import EnvironmentSpec, LimitsSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout
from node.submission.reader import MAX_EXPANSION, bounds_of, read_rollouts
from node.submission.writer import compress, write_rollouts

ROWS = 4
SPEC = RunSpec(
    name="hostile",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=ROWS, max_prompt_tokens=16, max_new_tokens=48),
)
GROUP = [
    Rollout(
        seed=bytes([row]) * 16,
        prompt_ids=[5, 6, 7],
        completion_ids=list(range(10 + row)),
        logprobs=[-1.5] * (10 + row),
        segment_versions=[3],
        segment_tokens=[10 + row],
        proofs=[bytes(range(256)) + b"\x00\x01"],
    )
    for row in range(ROWS)
]
VALID = write_rollouts(GROUP)
CONTENT = zstandard.decompress(VALID)
MOST = bounds_of(SPEC).content_bytes
MAX_SECONDS = 0.5
MAX_BYTES = 4 * 1024 * 1024
"""Of memory for one file of these small rules, whatever it claims."""


def refusal_of(body: bytes) -> Refusal:
    """The refusal of `body`; also: it came soon and took little memory, and the next honest file is read."""
    began = time.process_time()
    with pytest.raises(Refusal) as caught:
        read_rollouts(body, spec=SPEC)
    assert time.process_time() - began < MAX_SECONDS
    tracemalloc.start()
    try:
        with pytest.raises(Refusal):
            read_rollouts(body, spec=SPEC)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert read_rollouts(VALID, spec=SPEC) == GROUP
    assert len(caught.value.detail) <= 200
    return caught.value


def fields() -> dict[str, Any]:
    """The honest content, to be changed."""
    content: dict[str, Any] = msgspec.msgpack.decode(CONTENT)
    return content


def file_of(content: Any) -> bytes:
    return compress(msgspec.msgpack.encode(content))


def with_row(row: int = 1, **changes: Any) -> bytes:
    content = fields()
    content["rows"][row] |= changes
    return file_of(content)


def frame(content: bytes, *, size: int | None = None, single_segment: bool = True, flags: int = 0) -> bytes:
    """A frame of uncompressed blocks, by hand (RFC 8878): its header says `size`, by default the truth."""
    said = len(content) if size is None else size
    head = b"\xe0" if single_segment else b"\xc0\x58"  # a window of 2 MiB
    blocks = [content[at : at + 2**17] for at in range(0, len(content), 2**17)] or [b""]
    raw = [struct.pack("<I", len(block) << 3 | (at == len(blocks) - 1))[:3] + block for at, block in enumerate(blocks)]
    return zstandard.FRAME_HEADER + bytes([head[0] | flags]) + head[1:] + struct.pack("<Q", said) + b"".join(raw)


def zeros(size: int, *, said: int) -> bytes:
    """A few bytes that decompress to `size` zeros, and say that they become `said`."""
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))
    return zstandard.FRAME_HEADER + b"\xe0" + struct.pack("<Q", said) + packed[zstandard.frame_header_size(packed) :]


# Not a frame at all.


def a_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("rollouts", VALID)
    return buffer.getvalue()


NO_FRAMES = {
    "empty": b"",
    "magic": zstandard.FRAME_HEADER,
    "magic and a header": VALID[:6],
    "two magics": zstandard.FRAME_HEADER * 2,
    "random": random.Random(0).randbytes(4096),
    "random after the magic": zstandard.FRAME_HEADER + random.Random(1).randbytes(4096),
    "zip": a_zip(),
    "json": b'{"rows": []}',
    "uncompressed": CONTENT,
    "beheaded": VALID[4:],
    "a byte before": b"\0" + VALID,
    "a byte after": VALID + b"\0",
    "another frame after": VALID + VALID,
    "an empty frame after": VALID + zstandard.compress(b""),
    "a skippable frame alone": b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
    "a skippable frame before": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + VALID,
    "a skippable frame after": VALID + b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
    "a frame of zstd 0.7": b"\x27\xb5\x2f\xfd" + VALID[4:],
    "a dictionary": b"\x37\xa4\x30\xec" + VALID[4:],
}


@pytest.mark.parametrize("name", NO_FRAMES)
def test_a_body_that_is_not_one_frame(name):
    assert refusal_of(NO_FRAMES[name]).reason == Reason.MALFORMED_SUBMISSION


def test_a_file_cut_short_anywhere():
    for length in range(len(VALID)):
        with pytest.raises(Refusal) as caught:
            read_rollouts(VALID[:length], spec=SPEC)
        assert caught.value.reason == Reason.MALFORMED_SUBMISSION


# Frames that say something else than they are.


def test_the_frames_made_by_hand_are_well_formed():
    """Otherwise the tests below would only show that garbage is refused."""
    assert read_rollouts(frame(CONTENT), spec=SPEC) == GROUP
    assert read_rollouts(frame(CONTENT, single_segment=False), spec=SPEC) == GROUP
    assert zstandard.ZstdDecompressor().decompress(zeros(1000, said=1000)) == bytes(1000)


def compressed(**settings: Any) -> bytes:
    return zstandard.ZstdCompressor(**settings).compress(CONTENT)


FRAMES = {
    "no size": compressed(write_content_size=False),
    "a size of zero": frame(b""),
    "a size of zero, with content": frame(CONTENT, size=0),
    "a byte less than it has": frame(CONTENT, size=len(CONTENT) - 1),
    "a byte more than it has": frame(CONTENT, size=len(CONTENT) + 1),
    "more than the limit": frame(CONTENT, size=MOST + 1),
    "an exabyte": frame(CONTENT, size=2**60),
    "the number for an unknown size": frame(CONTENT, size=2**64 - 1),
    "the number for an error": frame(CONTENT, size=2**64 - 2),
    "a checksum": compressed(write_checksum=True),
    "a checksum that is none": frame(CONTENT, flags=4),
    "a dictionary": zstandard.FRAME_HEADER + b"\xe1\x07" + frame(CONTENT)[5:],
    "a reserved bit": frame(CONTENT, flags=8),
    "a window of 16 MiB": frame(CONTENT, single_segment=False).replace(b"\xc0\x58", b"\xc0\x70", 1),
    "a window of 3.75 TiB": frame(CONTENT, single_segment=False).replace(b"\xc0\x58", b"\xc0\xff", 1),
    "a reserved block": frame(CONTENT)[:13] + b"\x07\0\0" + frame(CONTENT)[16:],
    "no last block": frame(CONTENT)[:13] + bytes([frame(CONTENT)[13] & 0xFE]) + frame(CONTENT)[14:],
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_the_protocol_does_not_allow(name):
    assert refusal_of(FRAMES[name]).reason == Reason.MALFORMED_SUBMISSION


def test_a_frame_made_with_a_dictionary_that_nobody_names():
    dictionary = zstandard.ZstdCompressionDict(CONTENT)
    body = zstandard.ZstdCompressor(dict_data=dictionary, write_dict_id=False, write_checksum=False).compress(CONTENT)
    assert refusal_of(body).reason in {Reason.MALFORMED_SUBMISSION, Reason.WRONG_SCHEMA}


# Bombs.


def test_a_decompression_bomb_is_refused_by_its_header():
    body = compress(bytes(2**28))
    assert len(body) < 10_000
    assert "state a size" in refusal_of(body).detail


def test_a_decompression_bomb_whose_header_lies_about_its_size():
    refusal = refusal_of(zeros(2**28, said=1000))
    assert refusal.reason == Reason.MALFORMED_SUBMISSION
    assert "state a size" not in refusal.detail


def test_zeros_up_to_the_limit_are_no_rollouts():
    assert refusal_of(compress(bytes(MOST))).reason == Reason.WRONG_SCHEMA


def test_a_million_empty_blocks_take_little_time():
    """Each costs its sender three bytes, and becomes nothing."""
    body = frame(b"", size=1)[:13] + b"\0\0\0" * 1_000_000
    assert refusal_of(body).reason == Reason.MALFORMED_SUBMISSION


def test_caps_that_nobody_reaches_do_not_make_a_bomb_of_a_small_file():
    """An operator who lets completions be a million tokens long still allows files of 4 MiB alone."""
    sampling = SamplingSpec(group_size=64, max_new_tokens=2**17)
    spec = RunSpec(name="wide", environments=SPEC.environments, sampling=sampling, limits=LimitsSpec())
    most = MAX_EXPANSION * spec.limits.max_submission_bytes
    assert bounds_of(spec).content_bytes == most
    with pytest.raises(Refusal, match="state a size"):
        read_rollouts(compress(bytes(most + 1)), spec=spec)


def test_a_frame_of_the_largest_size_costs_the_memory_that_the_rules_allow():
    """In a process of its own, whose peak nothing else has raised: a verifier reads many such files one by one."""
    script = textwrap.dedent(
        """
        import resource, sys
        from test_hostile_submissions import MOST, SPEC, Refusal, compress, fields, msgspec, read_rollouts
        content = fields()
        content["rows"] = [row | {"proofs": [b""] * (MOST // 12)} for row in content["rows"]]
        body = compress(msgspec.msgpack.encode(content))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(50):
            try:
                read_rollouts(body, spec=SPEC)
            except Refusal as refusal:
                assert refusal.reason == "wrong_schema", refusal
            else:
                sys.exit("it was read")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=__file__.rpartition("/")[0], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * 1024, "KiB"


# MessagePack that is none, or of other things.

NO_MESSAGEPACK = {
    "a byte that is never used": b"\xc1",
    "cut short": CONTENT[:-1],
    "a byte after": CONTENT + b"\0",
    "a second value": CONTENT + CONTENT,
    "an array of billions": CONTENT.replace(b"\xa4rows\x94", b"\xa4rows\xdd\xff\xff\xff\xff"),
    "bytes of billions": CONTENT.replace(b"\xaaprompt_ids\xc4\x0c", b"\xaaprompt_ids\xc6\xff\xff\xff\xff"),
    "a key that is not UTF-8": CONTENT.replace(b"\xa4seed", b"\xa4\xff\xfe\xff\xfe"),
    "a map of billions": b"\xdf\xff\xff\xff\xff" + CONTENT[1:],
}


@pytest.mark.parametrize("name", NO_MESSAGEPACK)
def test_content_that_is_not_one_messagepack_value(name):
    assert refusal_of(compress(NO_MESSAGEPACK[name])).reason == Reason.MALFORMED_SUBMISSION


def without(name: str) -> bytes:
    content = fields()
    del content["rows"][2][name]
    return file_of(content)


ARRAYS = ("prompt_ids", "completion_ids", "logprobs", "segment_versions", "segment_tokens")
SCHEMAS: dict[str, Callable[[], bytes]] = {
    "null": lambda: file_of(None),
    "a number": lambda: file_of(7),
    "rows alone": lambda: file_of(fields()["rows"]),
    "rows without a format": lambda: file_of({"rows": fields()["rows"]}),
    "a format without rows": lambda: file_of({"format": fields()["format"]}),
    "an older format": lambda: file_of(fields() | {"format": "swarmproof/rollouts/2"}),
    "a newer format": lambda: file_of(fields() | {"format": "swarmproof/rollouts/4"}),
    "another product's": lambda: file_of(fields() | {"format": "veriswarm/rollouts/3"}),
    "a format in bytes": lambda: file_of(fields() | {"format": b"swarmproof/rollouts/3"}),
    "a claimed reward": lambda: file_of(fields() | {"reward": 1.0}),
    "a claimed reward in a row": lambda: with_row(reward=1.0),
    "a map of rows": lambda: file_of(fields() | {"rows": dict(enumerate(fields()["rows"]))}),
    "rows as arrays": lambda: file_of(fields() | {"rows": [list(row.values()) for row in fields()["rows"]]}),
    "a null row": lambda: file_of(fields() | {"rows": [*fields()["rows"][:3], None]}),
    "a short seed": lambda: with_row(seed=bytes(15)),
    "a long seed": lambda: with_row(seed=bytes(17)),
    "a seed of text": lambda: with_row(seed="s" * 16),
    "proofs of text": lambda: with_row(proofs=["x"]),
    "proofs in one": lambda: with_row(proofs=b"x"),
    "a null proof": lambda: with_row(proofs=[None]),
    "a timestamp": lambda: with_row(seed=msgspec.msgpack.Ext(-1, bytes(4))),
    "an extension": lambda: with_row(seed=msgspec.msgpack.Ext(5, bytes(16))),
    "nesting to exhaust the stack": lambda: compress(b"\x91" * (MOST - 1) + b"\x90"),
    "nesting in a field": lambda: compress(CONTENT.replace(b"\xa4seed\xc4", b"\xa4seed" + b"\x91" * 3000 + b"\xc4")),
    "nesting in a field that is unknown": lambda: compress(
        CONTENT.replace(b"\xa4rows", b"\xa4row_" + b"\x81\xa1a" * 1000 + b"\x90\xa4rows", 1)
    ),
    "a key that is no text": lambda: compress(CONTENT.replace(b"\xa4seed", b"\xc4\x04seed")),
    "a key that is a number": lambda: compress(CONTENT.replace(b"\xa4seed", b"\x07")),
    **{f"{name} missing": lambda name=name: without(name) for name in ("seed", *ARRAYS, "proofs")},
    **{f"{name} as a list": lambda name=name: with_row(**{name: [1, 2, 3]}) for name in ARRAYS},
    **{f"{name} null": lambda name=name: with_row(**{name: None}) for name in ("seed", *ARRAYS, "proofs")},
    **{f"{name} cut within an item": lambda name=name: with_row(**{name: bytes(15)}) for name in ARRAYS},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_another_schema(name):
    assert refusal_of(SCHEMAS[name]()).reason == Reason.WRONG_SCHEMA


def test_a_refusal_does_not_repeat_what_the_file_says():
    """It goes into the log, which everybody reads."""
    for body in (with_row(**{"<script>": 1}), file_of(fields() | {"format": "<script>"})):
        assert "<script>" not in refusal_of(body).detail


def twice(name: bytes) -> bytes:
    """The first row's field of this name a second time, before it."""
    field = b"\xa4seed\xc4\x10" + bytes(16)
    assert name == b"seed"
    return CONTENT.replace(b"\x87" + field, b"\x88" + field + field, 1)


def reordered() -> bytes:
    content = fields()
    content["rows"][0] = dict(reversed(content["rows"][0].items()))
    return msgspec.msgpack.encode(content)


OTHER_ENCODINGS = {
    "a field twice": twice(b"seed"),
    "fields in another order": reordered(),
    "the format last": msgspec.msgpack.encode(dict(reversed(fields().items()))),
    "a length in two bytes": CONTENT.replace(b"\xa4seed\xc4\x10", b"\xa4seed\xc5\x00\x10", 1),
    "a length in four bytes": CONTENT.replace(b"\xa4seed\xc4\x10", b"\xa4seed\xc6\x00\x00\x00\x10", 1),
    "a key's length in a byte": CONTENT.replace(b"\xa4seed", b"\xd9\x04seed", 1),
    "a long array of rows": CONTENT.replace(b"\xa4rows\x94", b"\xa4rows\xdc\x00\x04", 1),
    "a long map": b"\xde\x00\x02" + CONTENT[1:],
}


@pytest.mark.parametrize("name", OTHER_ENCODINGS)
def test_another_encoding_of_the_same_rows(name):
    content = OTHER_ENCODINGS[name]
    assert content != CONTENT
    assert msgspec.msgpack.decode(content) == fields(), "it says the same"
    assert refusal_of(compress(content)).reason == Reason.WRONG_SCHEMA


# Another number of rows.


@pytest.mark.parametrize("rows", [0, ROWS - 1, ROWS + 1])
def test_more_or_fewer_rows_than_were_leased(rows):
    """Best of n by leaving out the worst."""
    assert refusal_of(write_rollouts((GROUP + GROUP)[:rows])).reason == Reason.WRONG_GROUP_SIZE


def test_three_million_rows():
    assert refusal_of(file_of(fields() | {"rows": [{}] * 3_000_000})).reason == Reason.MALFORMED_SUBMISSION


def test_as_many_rows_as_fit_the_content():
    empty = dict.fromkeys(ARRAYS, b"") | {"proofs": []}
    rows = [{"seed": bytes(16)} | empty] * (MOST // 130)
    assert refusal_of(file_of(fields() | {"rows": rows})).reason == Reason.WRONG_GROUP_SIZE


# Anything at all.


def mutations(body: bytes, *, count: int, seed: int) -> Iterator[bytes]:
    """Bytes changed, inserted, deleted or moved."""
    draw = random.Random(seed)
    for _ in range(count):
        changed = bytearray(body)
        for _ in range(draw.choice((1, 1, 1, 2, 8))):
            at = draw.randrange(len(changed))
            kind = draw.randrange(5)
            if kind <= 1:
                changed[at] = draw.randrange(256)
            elif kind == 2:
                changed[at] ^= 1 << draw.randrange(8)
            elif kind == 3:
                changed[at : at + draw.randrange(1, 5)] = draw.randbytes(draw.randrange(0, 5))
            else:
                source = draw.randrange(len(changed))
                changed[at : at + 8] = changed[source : source + 8]
        yield bytes(changed)


@pytest.mark.parametrize("packed", [False, True], ids=["the file", "the content"])
def test_mutated_files(packed):
    reasons: Counter[Reason] = Counter()
    for changed in mutations(CONTENT if packed else VALID, count=2000, seed=1):
        try:
            rollouts = read_rollouts(compress(changed) if packed else changed, spec=SPEC)
        except Refusal as refusal:
            reasons[refusal.reason] += 1
        else:
            assert len(rollouts) == ROWS
            assert all(isinstance(rollout, Rollout) for rollout in rollouts)
    assert reasons.total() > 500
    assert reasons.keys() <= {Reason.MALFORMED_SUBMISSION, Reason.WRONG_SCHEMA, Reason.WRONG_GROUP_SIZE}
    assert read_rollouts(VALID, spec=SPEC) == GROUP
