"""What runs inside the sandbox for calls of the `python` tool: a conversation's cells, one after another.

What a cell prints reaches the transcript of a model, and everybody has to get the same bytes. So a program sees no
address: objects are numbered in the order in which a program asks for it, sets keep the order of insertion, and nothing
but a list of modules can be imported. What still shows an address is text, such as `<function f at 0x7f..>`, which
`node.sandbox.cells` cleans outside.

It is one file, because nothing of this package can be imported inside, and each file more is one that programs see.

As in harness.py, nothing here is out of the code's reach. A program that takes it apart can make replies of its own
that differ from machine to machine; the count of instructions and the memory's end are looked at once more after each
cell, so that one that lost them by accident is in doubt.
"""

from __future__ import annotations

import _ast
import _collections_abc as abc
import _warnings
import builtins
import gc
import io
import os
import sys
from math import isnan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import CodeType, FrameType
    from typing import Any, Self

FILE = "<python>"
MOST_DEPTH = 1000
MOST_PRINTED = 128 * 1024
"""Characters that are kept of what a cell prints."""

# fmt: off
MODULES = frozenset({
    "__future__", "abc", "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal",
    "enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re",
    "statistics", "string", "struct", "sys", "textwrap", "time", "typing", "unicodedata",
})
# fmt: on
"""What can be imported: modules that know nothing of the machine, and `sys` and `time`, which are ours."""

ADDRESS = "at 0x"
_CONVERSIONS = {ord("s"): " str", ord("r"): "repr", ord("a"): "ascii"}
_SET_OPERATORS = (_ast.BitOr, _ast.BitAnd, _ast.BitXor, _ast.Sub)
SEPARATOR = "\0"  # between the outputs of cells
DONE, STOPPED = 0, 1
_VALUE_HASHES: tuple[Any, ...] = (int.__hash__, str.__hash__, bytes.__hash__)
_OWN = (__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_numbers: dict[int, tuple[int, object]] = {}


class Unwound(BaseException):
    """Ends a cell that is too deep in its own calls."""


class Printed(io.StringIO):
    """What a cell printed, of which the beginning is kept."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, MOST_PRINTED - self.tell())])
        return len(text)


class Cells:
    """Runs cells within `steps` instructions of the interpreter for all of them together."""

    def __init__(self, steps: int, finish: Callable[[str], None]) -> None:
        self._steps, self._left, self._depth = steps, steps, 0
        self._finish = finish
        sys.stdout = self._printed = Printed()
        main = sys.modules["__main__"] = type(sys)("__main__")
        self._names: dict[str, Any] = main.__dict__
        self._names["__builtins__"] = self._builtins()

    def run(self, source: str) -> str:
        """Run one cell and return what it printed, and behind it its last value or its error."""
        self._printed.seek(0)
        self._printed.truncate()
        try:
            said = self._evaluated(source)
        except Unwound:
            return self._said("RecursionError: maximum recursion depth exceeded")
        except SystemExit:
            said = ""
        except BaseException as error:  # noqa: BLE001  (whatever it is, the next cell is still to come)
            said = self._described(error)
        if sys.gettrace() is None and self._is_counting:  # it lost the count, which happens to none by itself
            os._exit(STOPPED)
        return self._said(said)

    def _evaluated(self, source: str) -> str:
        self._is_counting = False
        parts, value = [*_compiled(source)], None
        self._depth, self._is_counting = 0, True
        sys.settrace(self._count)
        for part in parts:
            value = eval(part, self._names)  # noqa: S307  (this is the place for it)
        return "" if value is None else repr(value)

    def _said(self, last: str) -> str:
        sys.settrace(None)
        printed = self._printed.getvalue()
        return printed + ("\n" if printed and last and not printed.endswith("\n") else "") + last[:MOST_PRINTED]

    def _described(self, error: BaseException) -> str:
        if isinstance(error, MemoryError):
            os._exit(STOPPED)
        try:
            return f"{type(error).__name__}: {error}".replace("\n", " ").rstrip(": ")
        except BaseException:  # noqa: BLE001  (its class may say what it likes)
            return type(error).__name__

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count instructions and calls; end the process at the last one, and where memory ran out."""
        try:
            if event == "opcode":
                self._left -= 1
                if self._left < 0:
                    self._finish(self._said(f"TimeoutError: stopped after {self._steps} instructions"))
            elif event == "call":
                if frame.f_code.co_filename in _OWN:
                    return None
                self._left -= 1
                self._depth += 1
                if self._depth > MOST_DEPTH:
                    raise Unwound
                frame.f_trace_lines, frame.f_trace_opcodes = False, True
            elif event == "return":
                self._depth -= 1
            elif event == "exception" and issubclass(argument[0], MemoryError):
                os._exit(STOPPED)
        except MemoryError:
            os._exit(STOPPED)
        return self._count

    def _builtins(self) -> dict[str, Any]:
        build_class = builtins.__build_class__

        def build(function: Any, name: str, *bases: Any, **keywords: Any) -> Any:
            return build_class(function, name, *(bases if bases and bases != (object,) else (Plain,)), **keywords)

        def imported(name: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
            if level or name.partition(".")[0] not in MODULES:
                raise ModuleNotFoundError(f"No module named {name!r} here", name=name)
            if name == "sys":
                return system
            counted = sys.gettrace()
            sys.settrace(None)  # how many instructions an import takes depends on files
            try:
                return __import__(name, scope, local, names, level)
            finally:
                sys.settrace(counted)

        system = _system(self._printed)
        return {
            **builtins.__dict__,
            "__build_class__": build,
            "__import__": imported,
            "compile": compiled,
            "eval": evaluated,
            "exec": executed,
            "exit": leave,
            "frozenset": FrozenSet,
            "hash": hashed,
            "id": number,
            "open": opened,
            "quit": leave,
            "ascii": lambda value, /: cleaned(ascii(value)),
            "format": formatted,
            "repr": as_repr,
            "set": MutableSet,
            # Names that no source can have.
            " clean": cleaned,
            " set": MutableSet,
            " str": as_text,
        }


def leave(*_: object) -> None:
    """End the cell, as `exit` does."""
    raise SystemExit


def opened(*_: object, **__: object) -> Any:
    """Refuse to open a file."""
    raise PermissionError("there are no files here")


def evaluated(source: Any, scope: Any = None, local: Any = None, /) -> Any:
    """`eval`, with ordered sets."""
    return _run_text(source, "eval", scope, local)


def executed(source: Any, scope: Any = None, local: Any = None, /) -> None:
    """`exec`, with ordered sets."""
    _run_text(source, "exec", scope, local)


def compiled(source: Any, file: str, mode: str, *others: Any, **settings: Any) -> Any:
    """`compile`, with ordered sets where it has no options."""
    plain = isinstance(source, str) and not others and not settings
    return _ordered_code(source, file, mode) if plain else compile(source, file, mode, *others, **settings)


def _run_text(source: Any, mode: str, scope: Any, local: Any) -> Any:
    caller = sys._getframe(2)  # noqa: SLF001  (as `eval` itself does)
    if isinstance(source, str):
        source = _ordered_code(source.lstrip(" \t") if mode == "eval" else source, "<string>", mode)
    if scope is None:
        scope, local = caller.f_globals, caller.f_locals if local is None else local
    if isinstance(scope, dict):  # `eval` would put those of this file there
        scope.setdefault("__builtins__", caller.f_builtins)
    return eval(source, scope, local)  # noqa: S307  (this is the place for it)


def _system(printed: io.StringIO) -> Any:
    """Return what a program gets as the module `sys`: nothing of it is the machine's."""
    system: Any = type(sys)("sys")
    for name in ("byteorder", "float_info", "hash_info", "int_info", "maxsize", "maxunicode"):
        setattr(system, name, getattr(sys, name))
    system.argv, system.exit, system.stdin = [""], leave, io.StringIO()
    system.stdout = system.stderr = printed
    system.version_info = sys.version_info[:2]
    system.version = "{}.{}".format(*system.version_info)
    system.getrecursionlimit = lambda: MOST_DEPTH
    system.setrecursionlimit = lambda _: None
    return system


def _compiled(source: str) -> Iterator[CodeType]:
    """Yield the code of a cell, with a last expression apart; raises SyntaxError, ValueError and the like."""
    tree: Any = compile(source, FILE, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    yield _ordered_code(tree, FILE, "exec")
    if last is not None:
        yield _ordered_code(_ast.Expression(last.value), FILE, "eval")


def _ordered_code(source: Any, file: str, mode: str) -> CodeType:
    tree: Any = compile(source, file, mode, _ast.PyCF_ONLY_AST, dont_inherit=True)
    _order_sets(tree)
    code: CodeType = compile(tree, file, mode, dont_inherit=True)
    return code


def _order_sets(tree: Any) -> None:
    """Replace what makes sets, and what makes text of objects, by calls that show no address."""
    left = [tree]
    while left:
        node = left.pop()
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                left += [item for item in value if isinstance(item, _ast.AST)]
                value[:] = [_replaced(item, node) for item in value]
            elif isinstance(value, _ast.AST):
                left.append(value)
                setattr(node, name, _replaced(value, node))


def _replaced(node: Any, parent: Any) -> Any:
    kind, inner, is_sum = type(node), node, type(parent) is _ast.BinOp and type(parent.op) in _SET_OPERATORS
    if kind is _ast.FormattedValue and node.conversion in _CONVERSIONS:  # before it is filled up to a width
        name = _named(_CONVERSIONS[node.conversion], node)
        node.value, node.conversion = _placed(_ast.Call(name, [node.value], []), node), -1
    if kind is _ast.Name and node.id == "str" and _makes_text(parent, node):
        return _named(" str", node)
    if kind is _ast.Set:
        name, inner = " set", _placed(_ast.Tuple(node.elts, _ast.Load()), node)
    elif kind is _ast.SetComp:
        name, inner = " set", _placed(_ast.GeneratorExp(node.elt, node.generators), node)
    elif is_sum and kind is _ast.Call and getattr(node.func, "attr", "") in ("keys", "items"):
        name = " set"
    elif (
        (kind is _ast.JoinedStr and type(parent) is not _ast.FormattedValue)
        or (kind is _ast.Call and getattr(node.func, "attr", "") == "format")
        or (kind is _ast.BinOp and type(node.op) is _ast.Mod and type(getattr(node.left, "value", 0)) is str)
    ):
        name = " clean"
    else:
        return node
    return _placed(_ast.Call(_named(name, node), [inner], []), node)


def _makes_text(parent: Any, node: Any) -> bool:
    """Tell whether `str` is called here, or handed to what calls it."""
    if type(parent) is _ast.keyword:
        return parent.arg in ("key", "default")
    is_call = type(parent) is _ast.Call
    return is_call and (parent.func is node or getattr(parent.func, "id", "") == "map")


def _named(name: str, at: Any) -> Any:
    return _placed(_ast.Name(name, _ast.Load()), at)


def _placed(node: Any, at: Any) -> Any:
    for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
        setattr(node, name, getattr(at, name))
    return node


def cleaned(text: Any) -> Any:
    """Return a text without the addresses in it; anything else as it is."""
    if not isinstance(text, str) or ADDRESS not in text:
        return text
    first, *others = text.split(ADDRESS)
    return first + "".join([f"{ADDRESS}0{other.lstrip('0123456789abcdefABCDEF')}" for other in others])


def as_text(*value: Any, **settings: Any) -> Any:
    """`str`, without addresses."""
    return cleaned(str(*value, **settings))


def as_repr(value: Any, /) -> Any:
    """`repr`, without addresses."""
    return cleaned(repr(value))


def formatted(value: Any, form: str = "", /) -> Any:
    """`format`, without addresses."""
    return cleaned(format(value, form))


def number(value: object) -> int:
    """The place of an object among those whose number was asked for, from 1; kept, so that none is used twice."""
    return _numbers.setdefault(id(value), (len(_numbers) + 1, value))[0]


def hashed(value: Any) -> int:
    """The hash of a value, which is the same everywhere; of an object without one its number."""
    by: Any = type(value).__hash__
    own = hash(value)
    if by in _VALUE_HASHES or (by is float.__hash__ and not isnan(value)):
        return own
    if by is tuple.__hash__:
        return hash(tuple(map(hashed, value)))
    # One that is written in Python ends here again, or at a value.
    return own if type(by) is type(hashed) else number(value)


class Plain:
    """What a class without bases is based on; its instances show no address."""

    __slots__ = ()
    __hash__ = number

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__qualname__} object>"


class FrozenSet(abc.Set):  # type: ignore[type-arg]  # without `typing`, a type has no arguments here
    """A set whose items stay in the order in which they came."""

    __slots__ = ("_items",)
    __class_getitem__: Any = classmethod(type(list[int]))

    def __init__(self, items: Iterable[Any] = (), /) -> None:
        self._items = dict.fromkeys(items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(sorted(map(hashed, self))))

    def __repr__(self) -> str:
        name = type(self).__name__
        shown = "{" + ", ".join([repr(item) for item in self._items]) + "}" if self._items else ""
        return shown if shown and name == "set" else f"{name}({shown})"

    def copy(self) -> Self:
        return type(self)(self._items)

    def union(self, *others: Iterable[Any]) -> Self:
        return type(self)([item for items in (self._items, *others) for item in items])

    def intersection(self, *others: Iterable[Any]) -> Self:
        kept = [dict.fromkeys(other) for other in others]
        return type(self)([item for item in self if all(item in other for other in kept)])

    def difference(self, *others: Iterable[Any]) -> Self:
        left = [dict.fromkeys(other) for other in others]
        return type(self)([item for item in self if not any(item in other for other in left)])

    def symmetric_difference(self, other: Iterable[Any]) -> Self:
        found = type(self)(other)
        return type(self)([*self.difference(found), *found.difference(self)])

    def issubset(self, other: Iterable[Any]) -> bool:
        return self <= type(self)(other)

    def issuperset(self, other: Iterable[Any]) -> bool:
        return all(item in self for item in other)


class MutableSet(FrozenSet, abc.MutableSet):  # type: ignore[type-arg]
    """The same that can change."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def add(self, item: Any) -> None:
        self._items[item] = None

    def discard(self, item: Any) -> None:
        self._items.pop(item, None)

    def clear(self) -> None:
        self._items.clear()

    def update(self, *others: Iterable[Any]) -> None:
        for other in others:
            self._items.update(dict.fromkeys(other))

    def intersection_update(self, *others: Iterable[Any]) -> None:
        self._items = dict.fromkeys(self.intersection(*others))

    def difference_update(self, *others: Iterable[Any]) -> None:
        self._items = dict.fromkeys(self.difference(*others))

    def symmetric_difference_update(self, other: Iterable[Any]) -> None:
        self._items = dict.fromkeys(self.symmetric_difference(other))


def answer(steps: int, cells: Sequence[str], wanted: int, answers: int) -> None:
    """Run the cells, write what each of the last `wanted` says to the file `answers`, and end the process."""
    said: list[str] = []

    def finish(last: str) -> None:
        said.extend([last] * (len(cells) - len(said)))
        text = SEPARATOR.join([each.replace(SEPARATOR, "\ufffd") for each in said[-wanted:]])
        left = memoryview(text.encode("utf-8", "replace"))
        while left:
            left = left[os.write(answers, left) :]
        os._exit(DONE)

    for kind, name in ((Plain, "object"), (FrozenSet, "frozenset"), (MutableSet, "set")):
        kind.__name__ = kind.__qualname__ = name
        kind.__module__ = "builtins"
    FrozenSet.register(frozenset)
    MutableSet.register(set)
    gc.disable()  # when it collects depends on all that was made before
    _warnings.filters.insert(0, ("ignore", None, Warning, None, 0))  # nobody would read them, and they import more
    sys.modules["_decimal"] = None  # type: ignore[assignment]  # built elsewhere with another library, or without one
    # Room for the count itself, and for what C calls between a program's own calls.
    sys.setrecursionlimit(4 * MOST_DEPTH)
    session = Cells(steps, finish)
    for cell in cells:
        said.append(session.run(cell))  # noqa: PERF401  (`finish` may need it before the last)
    finish("")
