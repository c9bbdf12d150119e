"""docs/architecture.md shows the rooms of the code as it is, and docs/glossary.md says where a word is defined."""

from __future__ import annotations

import re
from pathlib import Path

from pymdownx.slugs import slugify

from tools import draw_rooms

ROOT = Path(__file__).parents[2]


def test_the_picture_of_the_rooms_is_that_of_the_code():
    drawn = draw_rooms.PICTURE.read_text(encoding="utf-8")
    assert drawn == draw_rooms.draw(), "docs/images/rooms.svg is stale: run `make architecture`, and commit it"


def test_nothing_imports_back_up():
    """import-linter says the same; but a layer that joins two rooms with `:` lets them import each other."""
    for name in draw_rooms.PACKAGES:
        package = draw_rooms.read_package(name)
        order = package.rooms
        back = [(room, other) for room, other in package.imports if other in order[: order.index(room)]]
        assert not back, f"{name}: these run back up: {back}"


def test_the_picture_has_every_room():
    for name in draw_rooms.PACKAGES:
        folder = ROOT / name
        there = {path.name for path in folder.iterdir() if (path / "__init__.py").exists()}
        there |= {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
        assert there == set(draw_rooms.read_package(name).rooms)


def test_a_class_name_stands_for_one_thing():
    """Whoever greps for a class finds one. Names that begin with an underscore are their module's own."""
    modules: dict[str, list[str]] = {}
    for file in (file for name in draw_rooms.PACKAGES for file in (ROOT / name).rglob("*.py")):
        for found in re.findall(r"^class ([A-Za-z]\w*)", file.read_text(encoding="utf-8"), re.MULTILINE):
            modules.setdefault(found, []).append(str(file.relative_to(ROOT)))
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}


def test_each_term_of_the_glossary_says_where_the_protocol_defines_it():
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    protocol = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    sections = {slugify(case="lower")(head, "-") for head in re.findall(r"^#+ (.+)$", protocol, re.MULTILINE)}
    rows = re.findall(r"^\| (?!term \|)(\w.*?) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) > 50
    for term, _, where in rows:
        links = re.findall(r"\(protocol\.md#([^)]+)\)", where)
        assert links, term
        assert set(links) <= sections, term
    terms = [term.lower() for term, _, _ in rows]
    assert terms == sorted(set(terms)), "a term that stands twice, or out of its place"
