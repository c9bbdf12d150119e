"""The terminal: worker, verifier and auditor must see the same frames, whatever the tokens are."""

from __future__ import annotations

import numpy as np
import pytest

from node.protocol.terminal import (
    BACKGROUND_BIT,
    CURSOR,
    FOREGROUND_BIT,
    LINE_FEED,
    MAX_COLUMNS,
    MAX_ROWS,
    PRINTED,
    TYPED,
    Phase,
    Terminal,
)

FIELD = "@..\n.*.\n\n"


def fed(text: str, *, rows: int = 4, columns: int = 4) -> Terminal:
    terminal = Terminal.blank(rows, columns)
    for character in text:
        terminal.feed(ord(character))
    return terminal


def shown(terminal: Terminal) -> list[str]:
    """The characters of the screen, a space for an empty cell."""
    return ["".join(chr(cell & 0xFFFF or 32) for cell in line) for line in terminal.screen.tolist()]


def test_a_prompt_is_printed_unseen_and_shown_with_its_cursor_at_the_empty_line():
    for end in range(len(FIELD)):
        assert not fed(FIELD[:end]).frame().any()
    terminal = fed(FIELD)
    assert shown(terminal) == [" .. ", ".*. ", "    ", "    "]
    frame = terminal.frame()
    assert frame[0, 0] == CURSOR << BACKGROUND_BIT
    assert frame[1, 1] == ord("*") | PRINTED << FOREGROUND_BIT
    assert frame[3, 3] == 0


def test_a_frame_is_a_copy():
    terminal = fed(FIELD)
    before = terminal.frame()
    kept = before.copy()
    terminal.feed(ord("x"))
    assert (before == kept).all()


@pytest.mark.parametrize(
    ("keys", "cursor"),
    [
        ("", (0, 0)),
        ("l", (0, 1)),
        ("lj", (1, 1)),
        ("ljhk", (0, 0)),
        ("h", (0, 0)),  # the screen's border
        ("k", (0, 0)),
        ("llll", (0, 2)),  # the field's: nothing stands beyond
        ("jjjj", (1, 0)),
        ("\nlj", (0, 0)),  # Enter ended it
        ("\n\nlj", (0, 0)),
    ],
)
def test_keys_move_the_cursor_to_cells_that_something_stands_in(keys, cursor):
    assert fed(FIELD + keys).cursor == cursor


def test_a_space_looks_like_an_empty_cell_but_can_be_moved_to():
    terminal = fed("@  x\n\nl")
    assert terminal.cursor == (0, 1)
    assert np.flatnonzero(terminal.frame()).tolist() == [1, 3]


def test_any_other_key_is_written_under_the_cursor_in_its_own_colour():
    terminal = fed(FIELD + "lx")
    assert terminal.screen[0, 1] == ord("x") | TYPED << FOREGROUND_BIT
    assert terminal.cursor == (0, 1)


def test_enter_hides_the_cursor_and_nothing_changes_any_more():
    ended = fed(FIELD + "l\n")
    assert ended.phase is Phase.ENDED
    assert not (ended.frame() >> BACKGROUND_BIT).any()
    assert (fed(FIELD + "l\nxjj\n@").frame() == ended.frame()).all()


@pytest.mark.parametrize("unknown", [0, 1, 9, 13, 27, 31])
def test_tokens_that_are_no_characters_change_nothing_at_any_place(unknown):
    """Not even between the two line feeds: padding, end marks and control codes are not there."""
    text = FIELD + "lxj\n"
    for at in range(len(text)):
        assert (fed(text[:at] + chr(unknown) * 3 + text[at:]).frame() == fed(text).frame()).all()


def test_a_long_line_is_cut_at_the_border_and_a_long_prompt_scrolls():
    terminal = fed("abcdefgh\n1\n2\n3\n4\n\n")
    assert shown(terminal) == ["1   ", "2   ", "3   ", "4   "]
    assert shown(fed("abcdefgh\n\n")) == ["abcd", "    ", "    ", "    "]


def test_a_prompt_of_as_many_lines_as_the_screen_loses_none():
    assert shown(fed("1\n2\n3\n4\n\n")) == ["1   ", "2   ", "3   ", "4   "]


def test_a_field_without_a_beginning_has_its_cursor_in_the_first_cell_and_of_two_the_first_counts():
    assert fed("...\n\n").cursor == (0, 0)
    terminal = fed("...\n.@@\n@..\n\n")
    assert terminal.cursor == (1, 1)
    assert shown(terminal)[1:3] == [". @ ", "@.. "]


def test_nothing_was_printed_and_keys_still_do_no_harm():
    terminal = fed("\n\nhjklq")
    assert terminal.cursor == (0, 0)
    assert shown(terminal) == ["q   ", "    ", "    ", "    "]


@pytest.mark.parametrize("opening", ["", FIELD])
def test_the_largest_screen_and_a_hundred_thousand_hostile_tokens_stay_in_bounds(opening):
    """Of text that never ends, and of keys without an Enter."""
    terminal = fed(opening, rows=MAX_ROWS, columns=MAX_COLUMNS)
    held = terminal.screen.nbytes
    kinds = [0, 32, 64, 65, 104, 106, 107, 108, 2**16 - 1] if opening else [0, 9, 10, 64, 65, 65, 65, 2**16 - 1]
    for codepoint in np.random.default_rng(0).choice(kinds, size=100_000).tolist():
        if codepoint == LINE_FEED and terminal.phase is Phase.LINE:
            continue
        terminal.feed(codepoint)
        assert 0 <= terminal.row <= MAX_ROWS
        assert 0 <= terminal.column <= MAX_COLUMNS
    assert terminal.screen.nbytes == held
    assert terminal.frame().max() < 2 << BACKGROUND_BIT
