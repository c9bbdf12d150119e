"""What a node says of itself is shown to everybody: a nickname that draws over the page around it gets no further."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from msgspec import UNSET, DecodeError, json

from node import cli
from node.protocol.messages import Registration
from node.protocol.profiles import Hardware, check_nickname, fold_nickname, hardware_of
from node.protocol.reasons import Reason, Refusal
from node.worker.daemon import WorkerSettings
from shardcast.wire import encode

NICKNAMES = ["a", "Zo\u00eb 7", "a.b_c-d", "\u05d3\u05d5\u05d3", "\u6771\u4eac", "0" * 32]
MARKED = {
    "Hindi": "\u0939\u093f\u0928\u094d\u0926\u0940",
    "Hindi, three marks": "\u091c\u093c\u0940\u0902",
    "Burmese, four marks": "\u1019\u103c\u103d\u103e\u102c",
    "Thai": "\u0e19\u0e49\u0e33\u0e1d\u0e19",
    "Tamil": "\u0ba4\u0bae\u0bbf\u0bb4\u0bcd",
    "Arabic": "\u0645\u064f\u062d\u064e\u0645\u064e\u0651\u062f",
    "Yoruba": "\u1eb9\u0301",
}
NONE = {
    "": "1 to 32",
    "a" * 33: "1 to 32",
    "<b>x</b>": "U+003C",
    "a&amp": "U+0026",
    "a\u202eb": "U+202E",
    "a\u2066b": "U+2066",
    "a\u200bb": "U+200B",
    "a\u00adb": "U+00AD",
    "a\nb": "U+000A",
    "a\u00a0b": "U+00A0",
    "\u3164": "U+3164",
    "\u2800": "U+2800",
    "\u00e1\u0301\u0301\u0301\u0301\u0301": "U+0301",
    "\u0301a": "U+0301",
    "7\u0301": "U+0301",
    "a \u0301": "U+0301",
    "a\u20dd": "U+20DD",
    "a\ufe0f": "U+FE0F",
    "a\u034f": "U+034F",
    "\u1780\u17b4": "U+17B4",
    "\u1820\u180f": "U+180F",
    "a\U000e0100": "U+E0100",
    "e\u0301": "normal form",
    "\U0001f600": "U+1F600",
    "\ud800": "U+D800",
    "\u212b": "normal form",
    " a": "ends",
    "a ": "ends",
    "a  b": "two together",
}


def test_a_nickname_is_what_a_page_can_show_beside_an_id() -> None:
    for name in (*NICKNAMES, *MARKED.values()):
        assert check_nickname(name) == name
    for name, wrong in NONE.items():
        with pytest.raises(Refusal, match=wrong.replace("+", r"\+")) as caught:
            check_nickname(name)
        assert caught.value.reason is Reason.BAD_NICKNAME


def test_a_search_minds_neither_case_nor_blanks() -> None:
    assert len({fold_nickname(text) for text in ("Zo\u00eb_GPU", " zo\u00eb gpu", "ZOE\u0308  GPU")}) == 1


def test_hardware_is_told_within_its_alphabet_whatever_a_driver_says() -> None:
    made = hardware_of("Intel(R) CPU @2.20GHz\x1b[31m" + "x" * 99, "torch 2.13.0+cpu", "<script>")
    assert (made.device[:25], len(made.device)) == ("Intel(R) CPU  2.20GHz 31mx"[:25], 64)
    assert (made.engine, made.dtype) == ("torch 2.13.0+cpu", "script")
    assert hardware_of("\u2028", "", " ").device == "unknown"
    assert json.decode(encode(made), type=Hardware) == made
    for device in ("<b>", "", "x" * 65, "CPU\n"):
        with pytest.raises(DecodeError):
            json.decode(json.encode({"device": device, "engine": "e", "dtype": "d"}), type=Hardware)


def test_who_says_nothing_sends_what_was_sent_before_there_was_anything_to_say() -> None:
    plain = Registration(software="s", engine="e", instance="0f" * 16, name="n")
    assert encode(plain) == b'{"software":"s","engine":"e","instance":"' + b"0f" * 16 + b'","name":"n"}'
    assert plain.nickname is UNSET


@pytest.mark.parametrize(
    ("options", "variables", "told"),
    [
        ((), {}, (None, True)),
        (("--nickname", " Zoe\u0308 7 ", "--no-hardware"), {}, ("Zo\u00eb 7", False)),
        ((), {"SWARMPROOF_WORKER_NICKNAME": "b", "SWARMPROOF_WORKER_HARDWARE": "false"}, ("b", False)),
        (("--nickname", "<b>"), {}, None),
    ],
)
def test_a_contributor_says_what_is_told(monkeypatch, tmp_path, options, variables, told) -> None:
    seen: list[WorkerSettings] = []

    async def record(settings: WorkerSettings, **_: object) -> None:
        seen.append(settings)

    monkeypatch.setattr("node.worker.daemon.run_worker", record)
    arguments = ["worker", "--coordinator", "http://h:1", "--run-id", "ab" * 32, "--state", str(tmp_path), *options]
    result = CliRunner().invoke(cli.main, arguments, env=variables)
    if told is None:
        assert (result.exit_code, "not U+003C" in result.output) == (2, True)
    else:
        assert [(one.nickname, one.shows_hardware) for one in seen] == [told], result.output
