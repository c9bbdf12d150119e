"""Whatever is imported of this project exists, in the files as well that neither mypy nor a test of this tier reads.

Benchmarks, tools and system tests run for minutes, or once a release: a name that moved away from under them would be
noticed by whoever needs a figure. Nothing is imported here, so that missing packages do not matter, and few files are
parsed: that would take five seconds of all of them.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from locations import ROOT

PACKAGES = ("benchmarks", "coordinator", "node", "shardcast", "tests", "toploc", "tools")
SUPPORT = "tests/support"
"""Tests import the modules in there by their names alone (pytest's `pythonpath`)."""

IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import[ \t]*(?:\([^)]*\)|[^(\n]+)|import[ \t]+[^\n]+)", re.MULTILINE
)
BOUND = re.compile(r"^(?:(?:async )?def|class) +(\w+)|^(\w+)(?: *:[^=\n]+)? *=[^=]", re.MULTILINE)
"""What most modules bind at their top level, where it can be seen without parsing them."""

Import = ast.Import | ast.ImportFrom


def sources(root: Path) -> list[Path]:
    """The Python files of the packages: untracked ones too, since a unit test starts no process, such as git."""
    return [file for name in PACKAGES for file in sorted((root / name).rglob("*.py"))]


def imports(text: str) -> Iterator[tuple[int, Import]]:
    """Every import statement of a module with the number of its line, in functions and in scripts as strings, too."""
    for found in IMPORT.finditer(text):
        try:
            tree = ast.parse(textwrap.dedent(found[0]))
        except SyntaxError:
            continue  # a sentence, or a script with fields to be filled in
        line = text.count("\n", 0, found.start()) + 1
        yield from ((line, one) for one in tree.body if isinstance(one, Import))


def top_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Every statement of a module outside functions and classes, also in branches."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for inner in ("body", "orelse", "finalbody"):
            waiting += getattr(one, inner, ())
        for branch in (*getattr(one, "handlers", ()), *getattr(one, "cases", ())):
            waiting += branch.body


class Tree:
    """The modules below a folder, read when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.text = cache(lambda file: file.read_text(encoding="utf-8"))
        self.plain_names = cache(lambda file: {name for found in BOUND.findall(self.text(file)) for name in found})
        self.names = cache(self._names)
        self.place = cache(self._place)
        self.has = cache(self._has)

    def _place(self, dotted: str) -> Path | None:
        """The file or the folder of a module of ours by its full name; None if there is none."""
        parts = dotted.split(".")
        base = self._root if parts[0] in PACKAGES else self._root / SUPPORT
        path = base.joinpath(*parts)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file
        return path if path.is_dir() and any(path.glob("*.py")) else None

    def _names(self, file: Path) -> frozenset[str]:
        """What a module binds at its top level, also in branches."""
        found: set[str] = set()
        for one in top_statements(ast.parse(self.text(file), str(file))):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(one.name)
            elif isinstance(one, Import):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in one.names}
            else:
                found |= {
                    node.id
                    for target in _targets(one)
                    for node in ast.walk(target)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                }
        return frozenset(found)

    def is_ours(self, dotted: str) -> bool:
        """Whether a module's name begins with a package of ours, or a module that tests share."""
        first = dotted.partition(".")[0]
        return first in PACKAGES or self.place(first) is not None

    def _has(self, module: str, name: str) -> bool:
        """Whether `from module import name` finds something."""
        place = self.place(module)
        if place is None:
            return False
        if name == "*" or self.place(f"{module}.{name}") is not None:
            return True
        return place.is_file() and (name in self.plain_names(place) or name in self.names(place))

    def broken(self, file: Path) -> Iterator[str]:
        """Each import of `file` that would fail, as `file:line: module.name`."""
        for line, one in imports(self.text(file)):
            if isinstance(one, ast.Import):
                missing = [each.name for each in one.names if self.is_ours(each.name) and not self.place(each.name)]
            else:
                module = self._module(one, file)
                names = [each.name for each in one.names] if self.is_ours(module) else []
                missing = [f"{module}.{name}" for name in names if not self.has(module, name)]
            yield from (f"{file.relative_to(self._root)}:{line}: {name}" for name in missing)

    def _module(self, one: ast.ImportFrom, file: Path) -> str:
        """The full name of the module that is imported from, also where dots stand for its beginning."""
        if not one.level:
            return one.module or ""
        folder = file.parents[one.level - 1].relative_to(self._root).as_posix()
        package = folder.removeprefix(f"{SUPPORT}/").replace("/", ".")
        return f"{package}.{one.module}" if one.module else package


def _targets(one: ast.stmt) -> Iterable[ast.AST]:
    """What a statement may bind names in."""
    if isinstance(one, ast.Assign):
        return one.targets
    if isinstance(one, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        return [one.target]
    if isinstance(one, ast.With | ast.AsyncWith):
        return [item.optional_vars for item in one.items if item.optional_vars is not None]
    return ()


def test_every_import_of_ours_names_something_that_exists():
    tree = Tree(ROOT)
    files = sources(ROOT)
    assert {file.relative_to(ROOT).parts[0] for file in files} >= set(PACKAGES)
    assert [broken for file in files for broken in tree.broken(file)] == []


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("from node.there import moved", "node.there.moved"),
        ("from node.gone import anything", "node.gone.anything"),
        ("import node.gone", "node.gone"),
        ("from node import gone", "node.gone"),
        ("from shared import moved", "shared.moved"),
        ("def late():\n    if True:\n        from node.there import moved", "node.there.moved"),
        ("try:\n    pass\nexcept ImportError:\n    from node.there import moved", "node.there.moved"),
        ("from node.there import held", None),
        ("from node.there import Kept, made, first, second, json", None),
        ("from node import there", None),
        ("from node.there import inside", "node.there.inside"),
        ("from shared import helper", None),
        ("import elsewhere, os.path", None),
    ],
)
def test_a_name_that_moved_away_is_found(tmp_path, line, missing):
    """Wherever the import stands, and however the name was bound."""
    for name, text in {
        "node/__init__.py": "",
        "node/there.py": "import json\nheld: int = 1\nfirst, (second, *_) = 1, (2,)\nclass Kept:\n    inside = 1\n"
        "if held:\n    def made():\n        moved = 1\n",
        f"{SUPPORT}/shared.py": "def helper(): ...\n",
        "benchmarks/figure.py": line + "\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [each for file in sources(tmp_path) for each in Tree(tmp_path).broken(file)]
    assert [each.rpartition(" ")[2] for each in found] == ([] if missing is None else [missing])


def test_relative_imports_are_followed(tmp_path):
    folder = tmp_path / SUPPORT / "independent"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "values.py").write_text("def derive(): ...\n")
    (folder / "slots.py").write_text("from .values import derive, moved\nfrom . import values, gone\n")
    found = [each.rpartition(" ")[2] for each in Tree(tmp_path).broken(folder / "slots.py")]
    assert sorted(found) == ["independent.gone", "independent.values.moved"]
