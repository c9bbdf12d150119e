"""Making hostile inputs from valid ones: bytes, trees (JSON, MessagePack), and text with tokens.

Everything is drawn from the generator that is passed in, so that a seed repeats a campaign.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from benchmarks.fuzzing.target import Mutator

MAX_INPUT_BYTES = 256 * 1024

_WORDS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFD8, 0xFFD9, 0xFFFF, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63)
_FORMATS = ("<B", "<H", ">H", "<I", ">I", "<Q", ">Q")
_VARINTS = (b"\x80\x00", b"\xff\x7f", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01", b"\x80" * 12)


def mixed(*weighted: tuple[int, Mutator]) -> Mutator:
    """Draw one of several mutators by weight."""
    mutators = [mutator for _, mutator in weighted]
    weights = [weight for weight, _ in weighted]

    def mutate(rng: Random, corpus: Sequence[bytes]) -> bytes:
        return rng.choices(mutators, weights)[0](rng, corpus)

    return mutate


def of_one(change: Callable[[Random, bytes], bytes]) -> Mutator:
    """Make a mutator that changes one input of the corpus."""
    return lambda rng, corpus: change(rng, rng.choice(corpus))[:MAX_INPUT_BYTES]


# Bytes.


def scramble(rng: Random, data: bytes, *, tokens: Sequence[bytes] = ()) -> bytes:
    """Edit at random places: flip bits, set edge values of every width, move, repeat and lose blocks."""
    edited = bytearray(data)
    for _ in range(1 + int(rng.expovariate(0.7))):
        _EDITS[rng.randrange(len(_EDITS))](rng, edited)
        if tokens and rng.random() < 0.3:
            at = rng.randint(0, len(edited))
            edited[at : at + rng.choice((0, 0, 1, 4))] = rng.choice(tokens)
    return bytes(edited)


def bytes_mutator(*tokens: bytes) -> Mutator:
    """Edit one input, or two spliced."""

    def mutate(rng: Random, corpus: Sequence[bytes]) -> bytes:
        data = rng.choice(corpus)
        if rng.random() < 0.15:
            other = rng.choice(corpus)
            data = data[: rng.randint(0, len(data))] + other[rng.randint(0, len(other)) :]
        return scramble(rng, data, tokens=tokens)[:MAX_INPUT_BYTES]

    return mutate


def _flip(rng: Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x20, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(rng: Random, data: bytearray) -> None:
    form = rng.choice(_FORMATS)
    size = struct.calcsize(form)
    at = rng.randint(0, max(0, len(data) - size))
    if rng.random() < 0.5 and len(data) >= size:
        value = struct.unpack_from(form, data, at)[0] + rng.choice((-1, 1, 16, -16))
    else:
        value = rng.choice(_WORDS)
    data[at : at + size] = struct.pack(form, value % 2 ** (8 * size))


def _varint(rng: Random, data: bytearray) -> None:
    at = rng.randint(0, len(data))
    data[at : at + rng.choice((0, 1, 2))] = rng.choice(_VARINTS)


def _insert(rng: Random, data: bytearray) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 1, 2, 4, 16, 64)))


def _delete(rng: Random, data: bytearray) -> None:
    at = rng.randint(0, len(data))
    del data[at : at + rng.choice((1, 1, 2, 4, 16, 256))]


def _repeat(rng: Random, data: bytearray) -> None:
    start = rng.randint(0, len(data))
    block = data[start : start + rng.choice((1, 4, 16, 64, 1024))]
    data[start:start] = block * rng.choice((1, 1, 2, 8, 256))


def _move(rng: Random, data: bytearray) -> None:
    start = rng.randint(0, len(data))
    size = rng.choice((1, 4, 16, 64))
    block = data[start : start + size]
    del data[start : start + size]
    at = rng.randint(0, len(data))
    data[at:at] = block


def _truncate(rng: Random, data: bytearray) -> None:
    del data[rng.randint(0, len(data)) :]


_EDITS = (_flip, _flip, _flip, _set, _set, _number, _number, _varint, _insert, _delete, _repeat, _move, _truncate)


# Trees. An object is a list of pairs, so that keys can be twice in it and in any order.


class Pairs(list[Any]):
    """An object's members, [key, value] each."""


class Raw(str):
    """A JSON text that is written as it is."""

    __slots__ = ()


Tree = Any
_NUMBERS = (
    *("0", "-0", "1", "-1", "00", "+1", "1.0", "0.5", "-0.0", "1e2", "1E2", "1e-7", "1e16", "1e308", "1e309", "-1e400"),
    *("5e-324", "0.1000000000000000055", "65497", "2147483647", "2147483648", "9007199254740991", "9007199254740992"),
    *("-9007199254740992", "9223372036854775808", "18446744073709551615", "18446744073709551616", "NaN", "Infinity"),
    "9" * 400,
)
_TEXTS = (
    *('""', '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"\\/"', '"\u202e\x7f"', '"\\u001B[2J"', '"x"', '" "'),
    *('"http://[::1]:1/"', '"http://a:99999999/"', '"https://x"', '"file:///"', '"../../x"', '"AAAA"', '"AAA="'),
    f'"{"a" * 64}"', f'"{"A" * 64}"', f'"{"0" * 65}"', f'"{"é" * 250}"', f'"{"x" * 70_000}"',
)  # fmt: skip
_OTHERS = (
    "null",
    "true",
    "false",
    "[]",
    "{}",
    "[[]]",
    "[null]",
    "[" * 1500 + "]" * 1500,
    '{"a":' * 900 + "0" + "}" * 900,
)
EDGES = tuple(Raw(text) for text in (*_NUMBERS, *_TEXTS, *_OTHERS))
"""JSON values at and past the edges of what a field may hold."""


def json_mutator(edges: Sequence[Tree] = EDGES, *, sloppy: float = 0.15) -> Mutator:
    """Edit JSON documents as trees; `sloppy` of them are also scrambled as bytes, or written uncanonically."""

    def mutate(rng: Random, corpus: Sequence[bytes]) -> bytes:
        data = rng.choice(corpus)
        tree = parse_json(data)
        if tree is None or rng.random() < sloppy / 2:
            return scramble(rng, data)[:MAX_INPUT_BYTES]
        edited = edit_tree(rng, tree, edges=edges, donors=lambda: parse_json(rng.choice(corpus)))
        try:
            return write_json(edited, spaced=rng.random() < sloppy / 2)[:MAX_INPUT_BYTES]
        except RecursionError:  # nested deeper than can be written here
            return scramble(rng, data)[:MAX_INPUT_BYTES]

    return mutate


def parse_json(data: bytes) -> Tree | None:
    """Parse a container as a tree of Pairs, lists, Raw numbers, strings, booleans and None; else return None."""
    try:
        tree = json.loads(data, object_pairs_hook=_pairs, parse_int=Raw, parse_float=Raw, parse_constant=Raw)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, list) else None


def _pairs(items: list[tuple[str, Any]]) -> Pairs:
    return Pairs([key, value] for key, value in items)


def write_json(tree: Tree, *, spaced: bool = False) -> bytes:
    """Write a tree without white space, so canonical where the tree is."""
    return _written(tree, ", " if spaced else ",", ": " if spaced else ":").encode("utf-8", "surrogatepass")


def _written(tree: Tree, comma: str, colon: str) -> str:
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, Pairs):
        return (
            "{" + comma.join(f"{_quoted(str(key))}{colon}{_written(value, comma, colon)}" for key, value in tree) + "}"
        )
    if isinstance(tree, list):
        return "[" + comma.join(_written(item, comma, colon) for item in tree) + "]"
    return _quoted(tree) if isinstance(tree, str) else json.dumps(tree)


_quoted = json.JSONEncoder(ensure_ascii=False).encode


def edit_tree(rng: Random, tree: Tree, *, edges: Sequence[Tree], donors: Callable[[], Tree] = lambda: None) -> Tree:
    """Replace, tweak, lose, repeat, move or rename a few members, or take them from a donor. Edit in place.

    `edges` are the values that members are replaced by.
    """
    root: list[Any] = [tree]
    for _ in range(1 + int(rng.expovariate(0.9))):
        container, index = _place(rng, root)
        roll = rng.random()
        if roll < 0.3:
            _assign(container, index, rng.choice(edges))
        elif roll < 0.6:
            _assign(container, index, _tweaked(rng, _value(container, index)))
        elif roll < 0.9 and container is not root:
            if _rearrange(rng, container, index):
                break  # repeated within repeated would not fit into any memory
        else:
            donor = donors()
            if donor is not None:
                _assign(container, index, _value(*_place(rng, [donor])))
    return root[0]


def _place(rng: Random, root: list[Any]) -> tuple[list[Any], int]:
    """Choose a random member: its container and its index there."""
    container, index = root, 0
    while True:
        value = _value(container, index)
        if not isinstance(value, list) or not value or rng.random() < 0.15:
            return container, index
        container, index = value, rng.randrange(len(value))


def _value(container: list[Any], index: int) -> Tree:
    return container[index][1] if isinstance(container, Pairs) else container[index]


def _assign(container: list[Any], index: int, value: Tree) -> None:
    if isinstance(container, Pairs):
        container[index] = [container[index][0], value]
    else:
        container[index] = value


def _tweaked(rng: Random, value: Tree) -> Tree:
    """Return something near `value`, of its type."""
    match value:
        case Raw():
            return _near_number(rng, value)
        case bool() | None:
            return rng.choice((True, False, None))
        case int():
            return value + rng.choice((-1, 1, 2**16, -(2**31)))
        case float():
            return value * rng.choice((-1.0, 2.0, 1e300, 0.0))
        case _:
            return _near_sequence(rng, value)


def _near_sequence(rng: Random, value: bytes | str | list[Any]) -> Tree:
    if isinstance(value, str):
        return _near_text(rng, value)
    return scramble(rng, value) if isinstance(value, bytes) else value[: rng.randint(0, len(value))]


def _near_number(rng: Random, value: Raw) -> Raw:
    if value.lstrip("-").isdigit() and len(value) < 30:
        return Raw(int(value) + rng.choice((-1, 1, 10, -1000, 2**31, 2**53)))
    return Raw(value + rng.choice(("0", ".0", "e1", "e-300", "1")))


def _near_text(rng: Random, value: str) -> str:
    at = rng.randint(0, len(value))
    start, end = value[:at], value[at:]
    odd = chr(rng.choice((0, 9, 10, 0x1B, 0x7F, 0xA0, 0xD800, 0x202E, 0xFFFD, 0x1F600)))
    plain = rng.choice("0123456789abcdef/:.@?#%-_ ")
    near = (start + odd + end, start, value + start, value.swapcase(), start + end * rng.choice((2, 50)))
    return rng.choice((*near, start + plain + end[1:]))


def _rearrange(rng: Random, container: list[Any], index: int) -> bool:
    """Rearrange a member; return whether it was repeated many times."""
    roll = rng.randrange(6)
    if roll == 0:
        del container[index]
    elif roll == 1:
        container.insert(rng.randint(0, len(container)), container[index])
    elif roll == 2:
        container.append(container.pop(index))
    elif roll == 3:
        container.extend([container[index]] * rng.choice((2, 64, 300)))
        return True
    elif isinstance(container, Pairs):
        key, value = container[index]
        container[index] = [_near_text(rng, str(key)), value]
    else:
        container.insert(index, None)
    return False
