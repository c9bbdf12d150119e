"""Cut a template's output at the texts that it was given, so that what it writes around them is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Final

from node.chat.errors import Irreducible
from node.chat.pieces import ENCODERS

_BY_LENGTH: Final = ("", "lstrip-lf", "rstrip-lf", "strip-lf", "lstrip", "rstrip", "strip", "json")
"""Encodings, those first of whose results others' are parts."""


def odd_text(tag: str) -> str:
    """Return a text that shows what is done to it: white space at both ends, and what JSON escapes."""
    return f'\n\n\n\n\n \t{tag} "{tag[::-1]}" \\ é \t \n\n\n\n\n'


class Cut:
    """An output as texts and slots by turns, as pieces are; a slot here is a label, or `label:encoding`."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.parts = tuple(parts)

    def has(self, label: str) -> bool:
        return label in self.labels()

    def labels(self, ending: str = "") -> list[str]:
        """Return the labels that end with `ending`, in order."""
        return [label for part in self.parts[1::2] if (label := part.partition(":")[0]).endswith(ending)]

    def label_before(self, label: str) -> str | None:
        """Return the label of the slot before that of `label`, None if it is the first."""
        at = self._at(label)
        return None if at == 1 else self.parts[at - 2].partition(":")[0]

    def slot(self, label: str, name: str) -> str:
        """Return the slot of `label`, under the name `name`."""
        _, colon, encoding = self.parts[self._at(label)].partition(":")
        return name + colon + encoding

    def between(self, start: str | None, end: str | None) -> Cut:
        """Return what stands between two slots; None is the beginning, or the end."""
        first = 0 if start is None else self._at(start) + 1
        last = len(self.parts) if end is None else self._at(end)
        if first >= last:
            raise Irreducible(f"it writes {start} after {end}")
        return Cut(self.parts[first:last])

    def without(self, *, prefix: str = "", suffix: str = "", what: str) -> Cut:
        """Take `prefix` off the first text and `suffix` off the last; raises Irreducible naming `what`."""
        parts = list(self.parts)
        if not parts[0].startswith(prefix):
            raise Irreducible(f"{what} differs from one conversation to another")
        parts[0] = parts[0][len(prefix) :]
        if not parts[-1].endswith(suffix):
            raise Irreducible(f"{what} differs from one conversation to another")
        parts[-1] = parts[-1][: len(parts[-1]) - len(suffix)]
        return Cut(parts)

    def only_text(self, what: str) -> str:
        """Return the text of a cut without slots."""
        if len(self.parts) > 1:
            raise Irreducible(f"{what} holds {self.parts[1]}")
        return self.parts[0]

    def named(self, names: Mapping[str, str]) -> tuple[str, ...]:
        """Return pieces whose slots have the names that `names` gives to labels."""
        return tuple(
            self.slot(part.partition(":")[0], names[part.partition(":")[0]]) if at % 2 else part
            for at, part in enumerate(self.parts)
        )

    def _at(self, label: str) -> int:
        if not self.has(label):
            raise Irreducible(f"it leaves {label} out")
        return 2 * self.labels().index(label) + 1


def cut(text: str, values: Mapping[str, str]) -> Cut:
    """Cut `text` at `values`, by label; what is not in it is left out. Raises Irreducible where one is twice."""
    found: list[tuple[int, int, str]] = []
    for label, value in values.items():
        for encoding in _BY_LENGTH:
            written = ENCODERS[encoding](value)
            if written and (times := text.count(written)):
                if times > 1:
                    raise Irreducible(f"it writes {label} {times} times")
                at = text.index(written)
                found.append((at, at + len(written), f"{label}:{encoding}" if encoding else label))
                break
    parts, end = [""], 0
    for start, stop, label in sorted(found):
        if start < end:
            raise Irreducible(f"it writes {label} inside of another text")
        parts[-1] = text[end:start]
        parts += [label, ""]
        end = stop
    parts[-1] = text[end:]
    return Cut(parts)


def common_prefix(texts: Iterable[str]) -> str:
    """Return the longest text that all of `texts` begin with."""
    return "".join(same[0] for same in takewhile(lambda each: len(set(each)) == 1, zip(*texts, strict=False)))


def common_suffix(texts: Iterable[str]) -> str:
    """Return the longest text that all of `texts` end with."""
    return common_prefix(text[::-1] for text in texts)[::-1]
