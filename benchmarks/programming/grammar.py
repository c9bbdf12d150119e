"""Random Python programs from a seed, of what tends to differ between machines when it differs at all.

Sets of all that can be hashed, objects that show addresses, hashes, numbers of objects, floating point functions, big
integers, exceptions with and without their messages, recursion, generators, classes of every make, text formatting,
regular expressions, random numbers and clocks, modules that are there and modules that are not. Programs run into
errors often, as those of a model do.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Sequence

INTS = ("0", "1", "-1", "2", "7", "255", "256", "257", "10**18", "2**61-1", "-2**63", "3**200", "True")
FLOATS = ("0.1", "-2.5", "1e300", "1/3", "float('inf')", "float('nan')", "-0.0", "2**0.5")
TEXTS = ("''", "'a'", "'Zoe'", "'αβγ'", "'a\\nb'", "'0x1f at 0x2a'", "'\\ud800'", "b'xy'", "'12'", "'é🙂'")
ATOMS = ("None", "...", "NotImplemented", "int", "str", "len", "print", "(1, None)", "()", "frozenset({None, 2})")
MATHS = ("sin", "cos", "tan", "exp", "log", "sqrt", "gamma", "atan", "log2", "sinh", "erf", "cbrt", "log1p", "asin")
MODULES = ("os", "numpy", "socket", "threading", "ctypes", "subprocess", "gc", "weakref", "traceback", "sympy", "uuid")
KINDS = ("ints", "floats", "texts", "lists", "sets", "dicts", "objects", "functions")


class Writer:
    """Writes one conversation's cells; names that were given values are used again, also in later cells."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names: dict[str, list[str]] = {kind: [] for kind in KINDS}
        self._used = 0

    def cells(self) -> tuple[str, ...]:
        return tuple(self._cell() for _ in range(self._pick((1, 1, 1, 2, 3))))

    def _cell(self) -> str:
        lines = [self._guarded(self._statement()) for _ in range(self._random.randint(2, 9))]
        if self._random.random() < 0.6:
            lines.append(self._value(depth=2))
        return "\n".join(lines)

    def _guarded(self, statement: str) -> str:
        """Let most statements fail for themselves alone."""
        if self._random.random() < 0.15:
            return statement
        inner = textwrap.indent(statement, "    ")
        return f"try:\n{inner}\nexcept Exception as error:\n    print(type(error).__name__, error)"

    def _pick(self, options: Sequence[int] | Sequence[str]) -> str:
        return self._random.choice(options)  # type: ignore[return-value]

    def _name(self, kind: str) -> str:
        self._used += 1
        name = f"{kind[0]}{self._used}"
        self._names[kind].append(name)
        return name

    def _known(self, kind: str) -> str | None:
        names = self._names[kind]
        return self._random.choice(names) if names and self._random.random() < 0.6 else None

    def _value(self, depth: int = 2) -> str:
        return getattr(self, "_" + self._pick(KINDS))(depth)  # type: ignore[no-any-return]

    def _some(self, depth: int) -> str:
        return "".join(self._value(depth - 1) + ", " for _ in range(self._random.randint(1, 5)))

    # -- values

    def _ints(self, depth: int) -> str:
        if depth <= 0:
            return self._known("ints") or self._pick(INTS)
        a, b, any_value = self._ints(depth - 1), self._ints(depth - 1), self._value(depth - 1)
        return self._pick(
            (
                f"({a} + {b})",
                f"({a} * {b})",
                f"({a} // {b})",
                f"({a} % {b})",
                f"({a} ^ {b})",
                f"(abs({a}) % 50) ** 9",
                f"hash({any_value})",
                f"id({any_value})",
                f"len({any_value})",
                f"sum({self._lists(depth - 1)})",
                f"int({self._texts(depth - 1)})",
                f"({a} >> 3)",
                f"max({self._lists(depth - 1)}, default=0)",
                f"round({self._floats(depth - 1)})",
                f"({any_value} is {any_value})",
                f"{any_value}.__sizeof__()",
            )
        )

    def _floats(self, depth: int) -> str:
        if depth <= 0:
            return self._known("floats") or self._pick(FLOATS)
        a, b = self._floats(depth - 1), self._ints(depth - 1)
        return self._pick(
            (
                f"math.{self._pick(MATHS)}({a})",
                f"({a} / {b})",
                f"({a} ** 1.7)",
                f"({a} + {b})",
                "random.random()",
                f"math.fsum({self._lists(depth - 1)})",
                f"cmath.exp(1j * {a})",
                f"random.gauss(0, {a})",
                f"float({b})",
                f"statistics.stdev([{a}, 1.5, {b}])",
                f"math.hypot({a}, {b})",
                "time.time()",
            )
        )

    def _texts(self, depth: int) -> str:
        if depth <= 0:
            return self._known("texts") or self._pick(TEXTS)
        any_value, text = self._value(depth - 1), self._texts(depth - 1)
        return self._pick(
            (
                f"str({any_value})",
                f"repr({any_value})",
                f"f'{{{self._known('objects') or 1}!r:>40}}'",
                f"'%s' % ({any_value},)",
                f"', '.join(map(str, {any_value}))",
                f"{text}.upper()",
                f"{text}[::-1]",
                f"'{{0}}{{0!r}}'.format({any_value})",
                f"re.sub('[a-m]+', '<\\\\g<0>>', {text})",
                f"json.dumps({any_value}, default=str)",
                f"type({any_value}).__name__",
                f"format({self._floats(depth - 1)}, '.17g')",
                f"textwrap.fill({text} * 9, 12)",
                f"unicodedata.name({text})",
                f"hex(id({any_value}))",
            )
        )

    def _lists(self, depth: int) -> str:
        if depth <= 0:
            return self._known("lists") or "[3, 1, 2]"
        any_value, key = (
            self._value(depth - 1),
            self._pick(("str", "id", "hash", "repr", "type", "len", "lambda v: -v")),
        )
        return self._pick(
            (
                f"[{self._some(depth)}]",
                f"list({self._sets(depth - 1)})",
                f"sorted({self._sets(depth - 1)}, key={key})",
                f"[v for v in {any_value}]",
                f"list({self._dicts(depth - 1)}.items())",
                "random.sample(range(99), 4)",
                f"list(itertools.islice({self._functions(depth - 1)}(), 5))",
                f"[*map({key}, {any_value})]",
                f"collections.Counter({any_value}).most_common(3)",
                f"heapq.nsmallest(3, {any_value})",
            )
        )

    def _sets(self, depth: int) -> str:
        if depth <= 0:
            return self._known("sets") or f"{{3, 'b', {self._pick(ATOMS)}, 1.5}}"
        a, b = self._sets(depth - 1), self._sets(depth - 1)
        return self._pick(
            (
                f"{{{self._some(depth)}}}",
                f"{{{self._some(depth)}{self._pick(ATOMS)}, *'qwe'}}",
                f"({a} {self._pick('|&-^')} {b})",
                f"set({self._value(depth - 1)})",
                f"{{v for v in {self._value(depth - 1)}}}",
                f"frozenset({a})",
                f"{a}.union({b}, [None, int])",
                f"{a}.symmetric_difference({b})",
                "eval('{9, None, 1, str}')",
                f"({self._dicts(depth - 1)}.keys() - [5])",
            )
        )

    def _dicts(self, depth: int) -> str:
        if depth <= 0:
            return self._known("dicts") or "{'b': 1, 'a': None}"
        return self._pick(
            (
                f"{{{self._value(depth - 1)}: {self._value(depth - 1)}, 'k': {self._value(depth - 1)}}}",
                f"{{v: hash(v) for v in {self._sets(depth - 1)}}}",
                f"dict.fromkeys({self._value(depth - 1)})",
                f"collections.defaultdict(list, {self._dicts(depth - 1)})",
                f"vars({self._objects(depth - 1)})",
            )
        )

    def _objects(self, depth: int) -> str:
        if depth <= 0:
            return self._known("objects") or "object()"
        a, b = self._value(depth - 1), self._value(depth - 1)
        return self._pick(
            (
                f"Plain({a})",
                f"Slotted({a})",
                f"Valued({a}, {b})",
                f"Named({a}, {b})",
                "Colour.RED",
                f"Hashed({a})",
                f"ValueError({a}, {b})",
                f"fractions.Fraction({self._ints(depth - 1)}, 7)",
                "datetime.date(2024, 2, 28)",
                f"decimal.Decimal({self._ints(depth - 1)}) / 7",
                "type('Made', (), {})()",
                f"iter({a})",
                f"Derived({a})",
                f"functools.partial(print, {a})",
                f"re.compile('a|b').search({self._texts(depth - 1)})",
            )
        )

    def _functions(self, depth: int) -> str:  # noqa: ARG002  (as the others)
        known = self._known("functions")
        return known or self._pick(
            ("(lambda: iter('ab'))", "Plain", "counting", "{}.keys", "str.upper", "max", "'x'.join")
        )

    # -- statements

    def _statement(self) -> str:
        kind = self._pick(KINDS)
        value = getattr(self, "_" + kind)(2)
        inner = textwrap.indent(self._short(), "    ")
        name = self._name(kind) if self._random.random() < 0.6 else "x"
        return self._pick(
            (
                f"{name} = {value}",
                f"{name} = {value}",
                f"{name} = {value}",
                f"print({self._some(2)})",
                f"print({self._some(2)})",
                (
                    f"try:\n    {name} = {value}\n{inner}\nexcept Exception as error:\n"
                    f"    print(type(error).__name__, error)"
                ),
                f"try:\n    {name} = {value}\nexcept Exception as error:\n    {name} = error\nfinally:\n{inner}",
                f"for v in {self._sets(1)}:\n    print(v)\n{inner}",
                f"{name} = {value}\nif {self._ints(1)} > 0:\n{inner}",
                (
                    f"def {name}(n=3):\n    {self._pick(('yield n', 'return n'))}\n"
                    f"    return {self._value(1)}\nprint({name}(2))"
                ),
                (
                    f"for n in range({self._pick(('3', '40', '400'))}):\n"
                    f"    {name} = (n * 7919) ** 3 % 1000003 / 3\nprint({name})"
                ),
                self._rare(name),
            )
        )

    def _short(self) -> str:
        return self._pick(
            (
                f"print({self._value(1)})",
                "pass",
                f"assert {self._value(1)}",
                f"x = {self._value(1)}",
                "raise KeyError(x)",
            )
        )

    def _rare(self, name: str) -> str:
        return self._pick(
            (
                f"import {self._pick(MODULES)}",
                "open('/etc/passwd')",
                "input()",
                "exit(3)",
                f"print('{name}' * 3000)",
                f"def {name}(n): return {name}(n + 1) + 1\n{name}(0)",
                "while True: x = 1",
                "print(globals())",
                "print(dir())",
                f"class {name}:\n    def __del__(self): print('gone')\n{name}()\n[[] for _ in range(2000)]",
                "1 +",
                "del x",
                f"{name} = []\n{name}.append({name})\nprint({name})",
                "import sys\nprint(sys.maxsize, sys.version)",
                f"try:\n    import {self._pick(MODULES)}\nexcept ImportError as error:\n    print(error)",
                "print(datetime.datetime.now())",
                (
                    f"@functools.lru_cache\ndef {name}(n): return n if n < 2 else {name}(n - 1) + {name}(n - 2)\n"
                    f"print({name}(70))"
                ),
                f"for v in range(10**7): {name} = v",
                "exec('print({1, None, print})')",
                "print(Colour, list(Colour), set(Colour))",
                "print(sorted([Plain(1), Plain(2), Slotted(3)], key=repr), sorted([len, print, max], key=hash))",
            )
        )


CLASSES = {
    "Plain": "class Plain:\n    def __init__(self, v=None): self.v = v",
    "Slotted": "class Slotted:\n    __slots__ = ('v',)\n    def __init__(self, v): self.v = v",
    "Derived": """class Derived(Plain):
    def __eq__(self, other): return isinstance(other, Derived)
    def __hash__(self): return hash(type(self))""",
    "Hashed": """class Hashed(Plain):
    def __hash__(self): return hash((self.v, None))
    def __repr__(self): return f"Hashed({self.v})\"""",
    "Valued": "@dataclasses.dataclass(frozen=True)\nclass Valued:\n    a: object\n    b: object = None",
    "Named": "class Named(typing.NamedTuple):\n    a: object\n    b: object",
    "Colour": "class Colour(enum.Enum):\n    RED = 1\n    BLUE = 'b'",
    "counting": "def counting():\n    n = 0\n    while n < 9:\n        yield n\n        n += 1",
}
IMPORTED = (
    "cmath",
    "collections",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "random",
    "re",
    "statistics",
    "textwrap",
    "time",
    "typing",
    "unicodedata",
)


def conversation(seed: int) -> tuple[str, ...]:
    """Return the cells of program `seed`; in one of ten, the modules and classes that it refers to are not there."""
    cells = Writer(seed).cells()
    if seed % 10 == 0:
        return cells
    text = "\n".join(cells)
    made = {name: source for name, source in CLASSES.items() if name in text}
    if {"Derived", "Hashed"} & made.keys():
        made = {"Plain": CLASSES["Plain"]} | made
    classes = "\n".join(made.values())
    modules = [name for name in IMPORTED if f"{name}." in text + classes]
    first = "".join(f"import {name}\n" for name in modules) + f"{classes}\nx = 5\n"
    return (first + cells[0], *cells[1:])
