"""Canonical JSON: if one value had two encodings, one signature or digest would stand for two messages."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcast.errors import Malformed
from shardcast.wire import MAX_INTEGER, Count, Digest, Wire, decode, derive, digest, encode, is_digest


class Inner(Wire, frozen=True):
    flag: bool
    note: Annotated[str, msgspec.Meta(max_length=20)] | None


class Sample(Wire, frozen=True):
    name: str
    count: Count
    ratio: float
    key: Digest
    inner: Inner
    many: Annotated[tuple[int, ...], msgspec.Meta(max_length=4)]


class Left(Wire, frozen=True, tag_field="type", tag="left"):
    at: Count


class Right(Wire, frozen=True, tag_field="type", tag="right"):
    at: Count


SAMPLE = Sample(name="é", count=12, ratio=0.5, key="ab" * 32, inner=Inner(flag=True, note=None), many=(1, -2))
RAW = encode(SAMPLE)
TEXT = RAW.decode()


def refused(raw: bytes, *, max_bytes: int = 100_000, cls: object = Sample) -> Malformed:
    with pytest.raises(Malformed) as caught:
        decode(cls, raw, max_bytes=max_bytes)
    return caught.value


def test_the_encoding_is_the_documented_one() -> None:
    assert TEXT == (
        '{"name":"é","count":12,"ratio":0.5,"key":"' + "ab" * 32 + '","inner":{"flag":true,"note":null},"many":[1,-2]}'
    )
    assert decode(Sample, RAW, max_bytes=len(RAW)) == SAMPLE


def test_every_truncation_is_refused() -> None:
    for size in range(len(RAW)):
        refused(RAW[:size])


def test_every_flipped_bit_is_refused_or_another_value() -> None:
    """A flip may give another valid value (its signature is then wrong), never the same one and never a crash."""
    for at in range(len(RAW)):
        for bit in range(8):
            flipped = RAW[:at] + bytes([RAW[at] ^ (1 << bit)]) + RAW[at + 1 :]
            try:
                value = decode(Sample, flipped, max_bytes=1000)
            except Malformed:
                continue
            assert value != SAMPLE
            assert encode(value) == flipped


@pytest.mark.parametrize(
    ("attack", "raw"),
    {
        "duplicate key, the last wins": TEXT.replace('"count":12', '"count":13,"count":12'),
        "duplicate key with the same value": TEXT.replace('"count":12', '"count":12,"count":12'),
        "keys in another order": TEXT.replace('"name":"é","count":12', '"count":12,"name":"é"'),
        "leading space": " " + TEXT,
        "trailing newline": TEXT + "\n",
        "space inside": TEXT.replace(":12", ": 12"),
        "a second document": TEXT + TEXT,
        "escaped letter": TEXT.replace("é", "\\u00e9"),
        "escaped slash": TEXT.replace("é", "\\/"),
        "escaped key": TEXT.replace('"name"', '"n\\u0061me"'),
        "integer with a fraction": TEXT.replace(":12", ":12.0"),
        "integer with an exponent": TEXT.replace(":12", ":1.2e1"),
        "integer with a plus": TEXT.replace(":12", ":+12"),
        "integer with a leading zero": TEXT.replace(":12", ":012"),
        "minus zero": TEXT.replace(":12", ":-0"),
        "float with a zero more": TEXT.replace("0.5", "0.50"),
        "float with an exponent": TEXT.replace("0.5", "5e-1"),
        "float written as integer": TEXT.replace("0.5", "1"),
        "float of many digits": TEXT.replace("0.5", "0.5" + "0" * 5000),
    }.items(),
    ids=lambda value: value if " " in value and "{" not in value else "",
)
def test_another_spelling_of_the_same_value_is_refused(attack: str, raw: str) -> None:
    assert refused(raw.encode()).code in ("not_canonical", "malformed")


@pytest.mark.parametrize(
    ("attack", "raw"),
    {
        "unknown key": TEXT[:-1] + ',"evil":1}',
        "unknown nested key": TEXT.replace('"note":null', '"note":null,"x":1'),
        "missing key": TEXT.replace('"count":12,', ""),
        "NaN": TEXT.replace("0.5", "NaN"),
        "Infinity": TEXT.replace("0.5", "Infinity"),
        "float that overflows": TEXT.replace("0.5", "1e999"),
        "null for a number": TEXT.replace("0.5", "null"),
        "boolean for a number": TEXT.replace(":12", ":true"),
        "string for a number": TEXT.replace(":12", ':"12"'),
        "negative count": TEXT.replace(":12", ":-12"),
        "count no JSON reader holds": TEXT.replace(":12", f":{MAX_INTEGER + 1}"),
        "huge integer": TEXT.replace(":12", ":" + "9" * 5000),
        "huge integer in an array": TEXT.replace("[1,", "[" + "9" * 5000 + ","),
        "upper-case digest": TEXT.replace("ab" * 32, "AB" * 32),
        "short digest": TEXT.replace("ab" * 32, "ab" * 31),
        "digest with a newline": TEXT.replace("ab" * 32, "ab" * 32 + "\\n"),
        "digest in other digits": TEXT.replace("ab" * 32, "٣" * 64),
        "too many elements": TEXT.replace("[1,-2]", "[1,2,3,4,5]"),
        "string too long": TEXT.replace("null", '"' + "x" * 21 + '"'),
        "lone high surrogate": TEXT.replace("é", "\\ud800"),
        "lone low surrogate": TEXT.replace("é", "\\udc00"),
        "surrogate in a key": TEXT.replace('"name"', '"\\ud800"'),
        "array for an object": "[" + TEXT + "]",
        "nothing": "",
        "null": "null",
        "byte order mark": "\ufeff" + TEXT,
        "nested arrays": TEXT.replace("[1,-2]", "[" * 90_000),
        "nested objects": '{"a":' * 15_000,
        "nesting in an unknown key": '{"zz":' + "[" * 45_000 + "]" * 45_000 + "}",
    }.items(),
    ids=lambda value: value if len(value) < 40 and "{" not in value else "",
)
def test_what_is_no_such_value_is_refused(attack: str, raw: str) -> None:
    assert refused(raw.encode()).code == "malformed"


@pytest.mark.parametrize("raw", [RAW.replace("é".encode(), bad) for bad in (b"\xff", b"\xc3", b"\xc0\xaf", b"\x00")])
def test_bytes_that_are_no_text_are_refused(raw: bytes) -> None:
    refused(raw)


def test_the_size_limit_comes_before_the_parser() -> None:
    assert refused(RAW, max_bytes=len(RAW) - 1).code == "oversized"
    assert refused(b"\x00" * 1001, max_bytes=1000).code == "oversized"


def test_a_union_is_told_apart_by_its_tag_alone() -> None:
    both = Left | Right
    assert decode(both, b'{"type":"right","at":1}', max_bytes=100) == Right(at=1)
    for raw in (b'{"at":1}', b'{"type":"up","at":1}', b'{"type":"left"}', b'{"at":1,"type":"left"}', b"{}", b"[]"):
        refused(raw, cls=both)


VALUES = st.builds(
    Sample,
    name=st.text(max_size=30),
    count=st.integers(0, MAX_INTEGER),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    key=st.binary(min_size=32, max_size=32).map(bytes.hex),
    inner=st.builds(Inner, flag=st.booleans(), note=st.none() | st.text(max_size=20)),
    many=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(tuple),
)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_every_value_survives_the_wire_and_any_json_reader(value: Sample) -> None:
    raw = encode(value)
    assert decode(Sample, raw, max_bytes=len(raw)) == value
    assert json.loads(raw)["ratio"] == value.ratio


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_the_decoder_raise_anything_else(raw: bytes) -> None:
    refused(raw)


def test_derivation_separates_contexts_and_the_edges_of_parts() -> None:
    """Without lengths, ("ab", "c") and ("a", "bc") would be one: a slot's seed could equal another's."""
    outputs = [
        derive("one", b"ab", b"c"),
        derive("one", b"a", b"bc"),
        derive("one", b"abc"),
        derive("one", b"abc", b""),
        derive("two", b"abc"),
    ]
    assert len(set(outputs)) == 5
    assert {len(output) for output in outputs} == {32}


def test_a_digest_is_the_same_for_bytes_and_views() -> None:
    assert digest(b"abc") == digest(memoryview(b"abc"))
    assert digest(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.mark.parametrize(
    "text", ["", "ab" * 31, "ab" * 33, "AB" * 32, "../" + "a" * 61, "ab" * 32 + "\n", "a" * 63 + "\0", "٣" * 64]
)
def test_only_a_digest_may_become_a_file_name(text: str) -> None:
    assert not is_digest(text)
    assert is_digest("0123456789abcdef" * 4)


def test_a_type_is_not_described_by_two_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec follows a null pointer then: a coordinator whose first two requests come together would be gone."""

    class Fresh(Wire, frozen=True):
        inner: Inner

    fresh, making, overlapped = encode(Fresh(inner=Inner(flag=True, note=None))), threading.Lock(), []
    real = msgspec.json.Decoder

    def slow(cls: type[Fresh]) -> msgspec.json.Decoder[Fresh]:
        overlapped.append(not making.acquire(blocking=False))
        time.sleep(0.02)  # all the others arrive meanwhile
        if not overlapped[-1]:
            making.release()
        return real(cls)

    monkeypatch.setattr(msgspec.json, "Decoder", slow)
    with ThreadPoolExecutor(4) as pool:
        values = list(pool.map(lambda _: decode(Fresh, fresh, max_bytes=100), range(4)))
    assert len(set(values)) == 1
    assert not any(overlapped)
