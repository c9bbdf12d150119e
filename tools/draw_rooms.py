"""Draw docs/images/rooms.svg: the rooms of each package, and which room imports which (`make architecture`).

A package's rooms are its folders and the modules at its top, in the order of its import-linter contract in
pyproject.toml. The drawing is a dependency matrix: a dot says that the room of its row imports the room of its column.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
PACKAGES = {
    "coordinator": ("node", "shardcast", "toploc"),
    "node": ("shardcast", "toploc"),
    "shardcast": (),
    "toploc": (),
}
"""From the top down, with those that each may import."""

WIDTH, MARGIN, ROW, CELL = 1000, 16, 19, 17
NAME_X, PURPOSE_X, MATRIX_X = 24, 126, 520
HEADER, FOOTER = 88, 14
PURPOSE_LETTERS = 64

STYLE = """
    text { fill: #1f2328; font-size: 12.5px; } .purpose, .column { fill: #57606a; font-size: 11.5px; }
    .title { font-size: 17px; font-weight: 600; } .name { font-weight: 600; }
    .band { fill: #f6f8fa; } .own { fill: #d0d7de; } .line { stroke: #d8dee4; stroke-width: 0.5; }
    .coordinator { fill: #0969da; } .node { fill: #1a7f37; } .shardcast { fill: #9a6700; } .toploc { fill: #8250df; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; } .purpose, .column { fill: #9198a1; }
      .band { fill: #161b22; } .own { fill: #3d444d; } .line { stroke: #30363d; }
      .coordinator { fill: #58a6ff; } .node { fill: #3fb950; } .shardcast { fill: #d29922; } .toploc { fill: #a371f7; }
    }
"""


@dataclass(frozen=True, slots=True)
class Package:
    """A package: its rooms layer by layer from the top down, what each is for, and what each imports.

    `imports` holds (room, imported) pairs; `imported` is a room of this package, or the name of another package.
    """

    name: str
    layers: tuple[tuple[str, ...], ...]
    purposes: dict[str, str]
    imports: frozenset[tuple[str, str]]

    @property
    def rooms(self) -> list[str]:
        """All rooms from the top down."""
        return [room for layer in self.layers for room in layer]


@functools.cache
def read_package(name: str) -> Package:
    """Read a package's rooms from its contract, docstrings and import statements."""
    folder, layers = ROOT / name, _layers(name)
    purposes, imports = {}, set()
    for room in (room for layer in layers for room in layer):
        files = [folder / f"{room}.py"] if (folder / f"{room}.py").exists() else sorted((folder / room).rglob("*.py"))
        purposes[room] = _purpose(files[0])
        for imported in (imported for file in files for imported in _imported_modules(file)):
            package, _, inner = imported.partition(".")
            target = inner.partition(".")[0] if package == name else package
            if package in PACKAGES and target and target != room:
                imports.add((room, target))
    return Package(name, layers, purposes, frozenset(imports))


def _layers(package: str) -> tuple[tuple[str, ...], ...]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        each for each in settings["tool"]["importlinter"]["contracts"] if each.get("containers") == [package]
    )
    return tuple(tuple(sorted(re.findall(r"\w+", layer))) for layer in contract["layers"])


def _purpose(file: Path) -> str:
    """Return the first sentence of a module's docstring, or as much of it as there is room for."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"\.\s|\.$", text.splitlines()[0] if text else "")[0]
    if len(sentence) <= PURPOSE_LETTERS:
        return sentence
    clause = re.split(r"[:;(]", sentence)[0].strip()
    return clause if len(clause) <= PURPOSE_LETTERS else clause[:PURPOSE_LETTERS].rpartition(" ")[0].rstrip(",") + " …"


def _imported_modules(file: Path) -> Iterator[str]:
    """Yield the dotted name of each import, those inside functions and for typing alone included."""
    for statement in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def draw() -> str:
    """Return the picture of all packages as SVG."""
    parts, top = [], MARGIN
    for name, below in PACKAGES.items():
        package = read_package(name)
        parts += _draw_package(package, below, top)
        top += HEADER + ROW * len(package.rooms) + FOOTER
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" font-family="system-ui, sans-serif">\n'
        f"  <!-- Made by `make architecture`; not to be edited by hand. -->\n  <style>{STYLE}  </style>\n"
    )
    return head + "".join(f"  {part}\n" for part in parts) + "</svg>\n"


def _draw_package(package: Package, below: tuple[str, ...], top: int) -> Iterator[str]:
    """Yield the elements of one package's matrix; the packages `below` it have the last columns."""
    rooms, first = package.rooms, top + HEADER
    bottom = first + ROW * len(rooms)
    lefts = {room: MATRIX_X + CELL * index for index, room in enumerate(rooms)}
    lefts |= {name: MATRIX_X + CELL * (len(rooms) + index) + 10 for index, name in enumerate(below)}
    tops = {room: first + ROW * index for index, room in enumerate(rooms)}
    right = max(lefts.values()) + CELL

    yield f'<text class="title" x="{NAME_X}" y="{first - 12}">{package.name}/</text>'
    for layer in package.layers[::2]:
        size = f'width="{right - MARGIN + 6}" height="{ROW * len(layer)}"'
        yield f'<rect class="band" x="{MARGIN}" y="{tops[layer[0]]}" {size} rx="4"/>'
    for column, left in lefts.items():
        middle = left + CELL / 2
        yield f'<path class="line" d="M{middle} {first} V{bottom}"/>'
        turned = f'transform="translate({middle + 4} {first - 6}) rotate(-60)"'
        yield f'<text class="column" {turned}>{column}{"/" if column in below else ""}</text>'
    for room, y in tops.items():
        base = y + ROW / 2 + 4
        yield f'<text class="name" x="{NAME_X}" y="{base}">{room}</text>'
        yield f'<text class="purpose" x="{PURPOSE_X}" y="{base}">{escape(package.purposes[room])}</text>'
        yield f'<path class="line" d="M{MATRIX_X} {y + ROW / 2} H{right}"/>'
        yield f'<rect class="own" x="{lefts[room] + 3}" y="{y + 4}" width="{CELL - 6}" height="{ROW - 8}" rx="2"/>'
        for imported in sorted(imported for importer, imported in package.imports if importer == room):
            kind = imported if imported in below else package.name
            place = f'cx="{lefts[imported] + CELL / 2}" cy="{y + ROW / 2}" r="4.5"'
            yield f'<circle class="{kind}" {place}><title>{room} imports {imported}</title></circle>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
