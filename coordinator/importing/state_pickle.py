"""Read what torch.save pickles of a dictionary of tensors, and run nothing of it.

A pickle is a program for a stack machine, of which two instructions, GLOBAL and REDUCE, import and call anything. Here
the few instructions that torch.save writes for such a dictionary are interpreted: a global is one of five words that
stand for themselves, a call is a description of a tensor or an empty dictionary, and everything else is refused.
Nothing that is built is copied or traversed, so the work is linear in the length of the pickle.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any, Final

from coordinator.importing.errors import UnreadableCheckpoint

MAX_PICKLE_BYTES: Final = 2**22
"""A tensor takes some 200; a 14B Finch has 1,646 of them."""
MAX_TENSORS: Final = 2**14
MAX_NAME: Final = 200
MAX_DIMENSIONS: Final = 8
MAX_NUMBERS: Final = 2**40


@dataclass(frozen=True, slots=True)
class _Global:
    """A global by its name; of a storage's type also safetensors' name of the dtype."""

    name: str
    dtype: str = ""


_REBUILD: Final = _Global("torch._utils _rebuild_tensor_v2")
_ORDERED_DICT: Final = _Global("collections OrderedDict")
_GLOBALS: Final = {
    known.name: known
    for known in (
        _REBUILD,
        _ORDERED_DICT,
        _Global("torch FloatStorage", "F32"),
        _Global("torch BFloat16Storage", "BF16"),
        _Global("torch HalfStorage", "F16"),
    )
}
_MARK: Final = object()
_LITERALS: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"})
_CONSTANTS: Final[dict[str, object]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage by the name of its record in the file, with its dtype as safetensors names it."""

    key: str
    dtype: str
    numbers: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor: numbers of a storage from `offset` on; counts are from 0 to MAX_NUMBERS."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_state(pickled: bytes) -> dict[str, PickledTensor]:
    """Return the tensors by name; raises UnreadableCheckpoint for anything but a dictionary of them."""
    if len(pickled) > MAX_PICKLE_BYTES:
        raise UnreadableCheckpoint(f"its pickle has {len(pickled)} bytes, and at most {MAX_PICKLE_BYTES} are read")
    machine = _Machine()
    try:
        for opcode, argument, position in pickletools.genops(pickled):
            try:
                machine.step(opcode.name, argument)
            except (IndexError, KeyError, TypeError) as error:
                raise _refused(f"{opcode.name} at byte {position} does not fit what is before it") from error
    except (ValueError, UnicodeError) as error:
        raise _refused(f"it is damaged ({error})") from error
    return _checked(machine.stack)


def _checked(stack: list[Any]) -> dict[str, PickledTensor]:
    if len(stack) != 1 or type(stack[0]) is not dict:
        raise _refused("it is not a dictionary")
    state: dict[str, Any] = stack[0]
    if not 0 < len(state) <= MAX_TENSORS:
        raise _refused(f"it has {len(state)} tensors, and 1 to {MAX_TENSORS} are read")
    for name, value in state.items():
        if len(name) > MAX_NAME or not isinstance(value, PickledTensor):
            raise _refused(f"{name[:MAX_NAME]!r} is not a tensor")
    return state


class _Machine:
    """The stack machine; a dictionary has str for keys, and an OrderedDict is one."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:  # noqa: C901, PLR0912  (a table of what each instruction does)
        """Do one instruction; raises IndexError, KeyError or TypeError where the stack lacks what it needs."""
        stack = self.stack
        match name:
            case "PROTO" | "STOP":
                pass
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_DICT":
                stack.append({})
            case "GLOBAL":
                if argument not in _GLOBALS:
                    raise _refused(f"it names {str(argument)[:MAX_NAME]!r}, which no dictionary of tensors needs")
                stack.append(_GLOBALS[argument])
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(reversed([stack.pop() for _ in range(int(name[-1]))])))
            case "TUPLE":
                stack.append(tuple(self._pop_to_mark()))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value])
            case "SETITEMS":
                items = self._pop_to_mark()
                _set_items(stack[-1], items)
            case "BINPERSID":
                stack.append(_storage(*stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_call(function, arguments))
            case "BUILD":
                # The attributes of a module's state dict: versions of its classes, which no tensor depends on.
                stack.pop()
                if type(stack[-1]) is not dict:
                    raise TypeError
            case _ if name in _LITERALS:
                stack.append(argument)
            case _ if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case _:
                raise _refused(f"it has the instruction {name}, which no dictionary of tensors needs")

    def _pop_to_mark(self) -> list[Any]:
        """Return what lies above the last mark, and remove both."""
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        items.reverse()
        return items


def _set_items(target: Any, items: list[Any]) -> None:
    keys = items[::2]
    if type(target) is not dict or len(items) % 2 or any(type(key) is not str for key in keys):
        raise TypeError
    target.update(zip(keys, items[1::2], strict=True))


def _storage(*parts: Any) -> Storage:
    kind, type_, key, _, numbers = _exactly(parts, 5)
    if kind != "storage" or not isinstance(type_, _Global) or not type_.dtype or type(key) is not str:
        raise TypeError
    return Storage(key, type_.dtype, _count(numbers))


def _call(function: Any, arguments: Any) -> object:
    """Return what a call stands for, of the two functions there are."""
    if type(arguments) is not tuple:
        raise TypeError
    if function is _ORDERED_DICT:
        _exactly(arguments, 0)
        return {}
    if function is not _REBUILD:
        raise TypeError
    storage, offset, shape, strides, *_ = _exactly(arguments, 6)
    if not isinstance(storage, Storage):
        raise TypeError
    return PickledTensor(storage, _count(offset), _counts(shape), _counts(strides))


def _exactly(parts: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    if len(parts) != count:
        raise TypeError
    return parts


def _counts(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or len(values) > MAX_DIMENSIONS:
        raise TypeError
    return tuple(map(_count, values))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBERS:
        raise TypeError
    return value


def _refused(fault: str) -> UnreadableCheckpoint:
    return UnreadableCheckpoint(f"its pickle is not that of a dictionary of tensors: {fault}")
