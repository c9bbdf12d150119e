"""What a slot asks: environment, problem, prompt and seeds, and what answers earn (section 5)."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .chat import conversation_text, reply_text, seen_turn
from .terminal import Terminal
from .values import Refused, derive, u32, u64

CANDIDATES = 32
POOLS = ("easy", "normal", "hard")


@dataclass(frozen=True)
class Slot:
    """A slot of a version, named by run and manifest digest in hex."""

    run_id: str
    manifest_digest: str
    number: int

    def _derive(self, purpose: str, *more: bytes) -> bytes:
        ids = bytes.fromhex(self.run_id), bytes.fromhex(self.manifest_digest), u64(self.number)
        return derive(f"swarmproof/1 {purpose}", *ids, *more)

    def seeds(self, group_size: int) -> list[bytes]:
        """Return the seed of each sample."""
        return [self._derive("sample seed", u32(sample))[:16] for sample in range(group_size)]

    def environment(self, weights: Sequence[int]) -> int:
        """Return which environment the slot is for, by the run's weights."""
        ticket = int.from_bytes(self._derive("slot problem")[:8], "big") % sum(weights)
        return next(index for index in range(len(weights)) if sum(weights[: index + 1]) > ticket)

    def problem(self, kept: Sequence[int] | None, candidate: int = 0) -> int:
        """Return the index of the problem: of any, or of the finite set `kept` its `candidate`."""
        if candidate:
            half = int.from_bytes(self._derive("slot candidate", u32(candidate))[:8], "big") // 2
        else:
            half = int.from_bytes(self._derive("slot problem")[8:16], "big") // 2
        return half if kept is None else kept[half % len(kept)]

    def pool(self, pools: dict[str, Any]) -> str:
        """Return which pool of problems the slot takes."""
        shares = [pools[name] for name in POOLS]
        ticket = int.from_bytes(self._derive("slot pool")[:8], "big") % sum(shares)
        return next(POOLS[index] for index in range(3) if ticket < sum(shares[: index + 1]))


def slot_name(named: dict[str, Any]) -> dict[str, Any]:
    """Return the name of a lease's or a verdict's slot, as a submission is signed for it (3.2)."""
    return {field: named[field] for field in ("manifest_digest", "slot", "candidate") if field in named}


def kept_of(environment: dict[str, Any]) -> list[int] | None:
    """Return the kept indexes of an environment's finite set, ascending; None where it has none (5.1)."""
    problems = environment.get("problems")
    if problems is None:
        return None
    count = problems["count"]
    if problems["kept"] is None:
        return list(range(count))
    bits = base64.b64decode(problems["kept"])
    kept = [index for index in range(8 * len(bits)) if bits[index // 8] >> index % 8 & 1]
    if len(bits) != -(-count // 8) or not kept or kept[-1] >= count:
        raise Refused("bad_value", "kept does not fit count")
    return kept


def pool_of(mean: float | None, pools: dict[str, Any]) -> str:
    """Return the pool of a problem with the mean reward of its last admitted group, None before the first."""
    if mean is None:
        return "normal"
    return "easy" if mean >= pools["easy_from"] else "hard" if mean <= pools["hard_to"] else "normal"


def mean_of(rewards: Sequence[float]) -> float:
    """Return the exact sum, rounded once, divided by the number."""
    return math.fsum(rewards) / len(rewards)


def candidate_of(slot: Slot, environment: dict[str, Any], pools: dict[str, Any], means: dict[int, float]) -> int:
    """Return which candidate the slot is for, by the means of its environment's problems before its policy."""
    kept = kept_of(environment)
    if kept is None:
        return 0
    wanted = slot.pool(pools)
    pooled = (pool_of(means.get(slot.problem(kept, number)), pools) for number in range(CANDIDATES))
    return next((number for number, pool in enumerate(pooled) if pool == wanted), CANDIDATES - 1)


def draws(name: str, index: int) -> Iterator[int]:
    """Yield the numbers that an environment draws for a problem (5.2)."""
    block = 0
    while True:
        drawn = derive("swarmproof/1 environment", name.encode(), u64(index), u32(block))
        yield from (int.from_bytes(drawn[start : start + 8], "big") for start in range(0, 32, 8))
        block += 1


@dataclass(frozen=True)
class Problem:
    """A problem of a built-in environment: its prompt, and the answer or, of a terminal, the way to it."""

    name: str
    prompt: str
    answer: str
    target: tuple[int, int] | None = None
    size: tuple[int, int] | None = None
    length_target: int | None = None
    penalty: float = 0.0
    chat: dict[str, Any] | None = None

    def reward(self, turns: Sequence[str], tokens: int) -> float:
        """Return what a completion with the texts `turns` and so many tokens earns."""
        if self.chat is not None:
            turns = [seen_turn(self.chat, turn) for turn in turns]
        if self.name == "terminal":
            earned = float(self._replay(turns[-1]))
        else:
            _, mark, answer = turns[-1].rpartition("</think>")
            earned = float(bool(mark) and answer.strip() == self.answer)
        if self.length_target is None:
            return earned
        return max(earned - self.penalty * abs(tokens - self.length_target), 0.0)

    def reply(self, turn: str) -> str | None:
        """Return what the environment says after a turn, None for nothing more."""
        if self.chat is None:
            return self._said(turn)
        said = self._said(seen_turn(self.chat, turn))
        return None if said is None else reply_text(self.chat, [{"role": "user", "content": said}])

    def _said(self, turn: str) -> str | None:
        if self.name != "calculator" or "</think>" in turn:
            return None
        if not re.fullmatch(r"[0-9]{1,9}([+*-][0-9]{1,9}){0,7}", turn.strip()):
            return "=?\n"
        return f"={calculate(turn.strip())}\n"

    def _replay(self, completion: str) -> bool:
        assert self.size is not None
        terminal = Terminal(*self.size)
        for char in self.prompt + completion[:64]:
            terminal.feed(ord(char) if ord(char) < 65536 else 0)
        return terminal.phase == "ended" and (terminal.row, terminal.column) == self.target


def calculate(text: str) -> int:
    """Return the value of numbers joined by `+`, `-` and `*`."""
    total = 0
    for sign, product in re.findall(r"([+-]?)([0-9]+(?:\*[0-9]+)*)", text):
        value = math.prod(map(int, product.split("*")))
        total += -value if sign == "-" else value
    return total


def _two_numbers(index: int, name: str, arguments: dict[str, Any]) -> tuple[int, int]:
    least = 10 ** (arguments.get("digits", 2) - 1)
    drawn = draws(name, index)
    return least + next(drawn) % (9 * least), least + next(drawn) % (9 * least)


def _plain_problem(environment: dict[str, Any], index: int) -> Problem:
    name, arguments = environment["name"], environment["arguments"]
    if name == "arithmetic":
        a, b = _two_numbers(index, name, arguments)
        return Problem(name, f"Q:{a}+{b}=?\nA:", str(a + b))
    if name == "calculator":
        a, b = _two_numbers(index, name, arguments)
        return Problem(name, f"Q:{a}*{b}=?\nA:", str(a * b))
    drawn = draws(name, index)
    if name == "reverse":
        shortest, longest = arguments.get("shortest", 3), arguments.get("longest", 5)
        length = shortest + next(drawn) % (longest - shortest + 1)
        word = "".join("abcdefgh"[next(drawn) % 8] for _ in range(length))
        return Problem(name, f"Q:rev {word}\nA:", word[::-1])
    if name == "terminal":
        rows, columns = arguments.get("rows", 4), arguments.get("columns", 8)
        count = rows * columns
        start = next(drawn) % count
        target = (start + 1 + next(drawn) % (count - 1)) % count
        cells = "".join({start: "@", target: "*"}.get(cell, " ") for cell in range(count))
        field = "".join(cells[row * columns : (row + 1) * columns] + "\n" for row in range(rows))
        return Problem(name, field + "\n", "", divmod(target, columns), (rows, columns))
    raise Refused("unknown_environment", name)


def problem_of(environment: dict[str, Any], index: int, chat: dict[str, Any] | None = None) -> Problem:
    """Return a problem of a built-in environment, as a chat where the run has them, with its length target if any."""
    plain, begin = _plain_problem(environment, index), 0
    if chat is not None:
        shown, begin = conversation_text(chat, [{"role": "user", "content": plain.prompt}])
        plain = replace(plain, prompt=shown, chat=chat)
    length = environment["length"]
    if length is None:
        return plain
    target = length["targets"][next(draws("length", index)) % len(length["targets"])]
    request = f"T:{target}\n" if length["form"] == "short" else f"Think for about {target} tokens before you answer.\n"
    prompt = plain.prompt[:begin] + request + plain.prompt[begin:]
    return replace(plain, prompt=prompt, length_target=target, penalty=length["penalty"])
