"""The documents are what other implementations and operators work from: they must say what the code does."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from locations import ROOT

from coordinator.run.membership import by_work
from coordinator.storage import log
from node.discovery import descriptor as board
from node.discovery import peer_book
from node.joining import session as joining
from node.protocol import control, membership, messages, peers, profiles
from node.protocol.admission import DRIFT, Figures, Finding, limit_of
from node.protocol.endpoints import ENDPOINTS, LOG_ENTRIES
from node.protocol.evidence import STATISTICS, Totals
from node.protocol.reasons import Reason
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS
from node.protocol.run import (
    DESCRIPTOR_DOMAIN,
    DESCRIPTOR_VERSION,
    DatasetSpec,
    Descriptor,
    LengthSpec,
    LevelSpec,
    LimitsSpec,
    LoraSpec,
    PackageSpec,
    PolicyHead,
    PoolsSpec,
    ProblemsSpec,
    ProofSpec,
    RunSpec,
    TeacherSpec,
    ThinkingSpec,
    ToolSpec,
    parse_run_toml,
)
from node.protocol.sampling import TABLE_DIGEST
from node.protocol.submission import MAX_LOGPROB, proof_bytes
from node.worker import proof_of_work
from shardcast.manifest import Delta, Head, Manifest, Payload

PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
RUN_TOML = (ROOT / "docs" / "run-toml.md").read_text(encoding="utf-8")


def section(number: int) -> str:
    """The text of one numbered section of the protocol."""
    return re.split(rf"^## {number}\. ", PROTOCOL, flags=re.MULTILINE)[1].split("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """The cells of every table row in `text`, without heads."""
    for line in text.splitlines():
        if line.startswith("|") and not set(line) <= set("|- "):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_sections_are_those_that_docstrings_name() -> None:
    titles = re.findall(r"^## (\d+)\. ", PROTOCOL, flags=re.MULTILINE)
    assert titles == [str(number) for number in range(1, 15)]


REASON_ROWS = {row[0].strip("`"): row for row in rows(section(9)) if row[0].startswith("`")}


def test_the_table_of_reasons_lists_exactly_the_codes_in_order() -> None:
    assert list(REASON_ROWS) == [reason.value for reason in Reason]


def test_each_reason_is_documented_where_and_with_which_status_it_comes() -> None:
    for reason in Reason:
        _, where, status, meaning, advice = REASON_ROWS[reason.value]
        assert (where, status) == ("door" if reason.status else "verdict", str(reason.status or "")), reason
        assert meaning, reason
        assert advice == reason.advice


JUDGED = [(row[0], row[1], row[2].strip("`")) for row in rows(section(7)) if len(row) == 3 and "limits." in row[1]]
"""Figure, limit and reason of each row of the table of section 7.2."""


def test_the_order_of_checks_is_the_order_of_the_codes() -> None:
    listed = [row[2].strip("`") for row in rows(section(6)) if row[0].isdigit()]
    verdicts = [reason.value for reason in Reason if reason.status is None]
    assert listed == verdicts[: len(listed)]
    judged = [reason for _, _, reason in JUDGED]
    assert list(dict.fromkeys(judged)) == verdicts[len(listed) : -1]


def test_the_figures_are_judged_in_the_documented_order() -> None:
    drifts = [name + DRIFT for name in STATISTICS]
    assert [figure for figure, _, _ in JUDGED] == [*Figures.__struct_fields__, *drifts]


@pytest.mark.parametrize(("figure", "limit", "reason"), JUDGED, ids=lambda value: value)
def test_a_figure_has_the_documented_limit_and_reason(figure: str, limit: str, reason: str) -> None:
    limits = LimitsSpec()
    spelled = {
        "-ln(limits.false_rejections)": -math.log(limits.false_rejections),
        "ln(12 / limits.false_rejections)": math.log(12 / limits.false_rejections),
    }
    expected = spelled[limit] if limit in spelled else getattr(limits, limit.removeprefix("limits."))
    assert limit_of(figure, limits) == (reason, pytest.approx(expected))


def test_the_statistics_are_documented_in_the_order_of_the_log() -> None:
    listed = [row[0] for row in rows(section(7)) if len(row) == 2 and row[0] in STATISTICS]
    assert listed == list(STATISTICS) == list(Totals.__struct_fields__)
    (text,) = re.findall(r"Totals has ([\w, ]+), each", section(8))
    assert text.split(", ") == listed


def test_the_schemes_are_documented_with_their_sizes() -> None:
    sizes = {row[0].strip("`"): row[2] for row in rows(section(6)) if len(row) == 4 and "/1" in row[0]}
    spec = {scheme: ProofSpec(scheme=scheme, top_k=7) for scheme in sizes}
    assert sorted(sizes) == sorted(msgspec.inspect.type_info(msgspec.structs.fields(ProofSpec)[0].type).values)
    for scheme, size in sizes.items():
        written = sum(int(count) * {"k": 7, "t": 31, "": 1}[unit] for count, unit in re.findall(r"(\d+)([kt]?)", size))
        assert proof_bytes(spec[scheme], tokens=31) == written


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+\.json)`", PROTOCOL)) - {"tokenizer.json"}))
def test_every_vector_file_that_is_named_exists(name: str) -> None:
    assert (ROOT / "tests" / "vectors" / "protocol" / name).is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "vectors" / "protocol").iterdir()), ids=lambda p: p.name)
def test_every_vector_file_is_named(path: Path) -> None:
    assert f"`{path.name}`" in PROTOCOL


MESSAGES = [
    messages.Registration,
    messages.RelayAnnouncement,
    messages.ReceivedFrom,
    messages.RelayList,
    messages.LeaseRequest,
    messages.LeaseReply,
    messages.Lease,
]
MESSAGES += [membership.Puzzle, membership.ProofOfWork, profiles.Hardware]
MESSAGES += [messages.NodeStanding, messages.Rejection, messages.SubmissionReply, messages.ErrorReply]


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_the_fields_of_a_message_are_documented_in_wire_order(cls: type[msgspec.Struct]) -> None:
    (text,) = [row[1] for row in rows(section(3)) if row[0] == cls.__name__]
    assert re.findall(r"(\w+): ", text) == list(cls.__struct_fields__)


ENTRIES = [messages.RunEntry, messages.PolicyEntry, messages.VerdictEntry, messages.BatchEntry]


@pytest.mark.parametrize("cls", ENTRIES, ids=lambda cls: cls.__name__)
def test_the_fields_of_a_log_entry_are_documented_in_wire_order(cls: type[msgspec.Struct]) -> None:
    tag = f'`"type":"{cls.__struct_config__.tag}"`'
    (text,) = [row[1] for row in rows(section(8)) if row[0] == tag]
    assert re.findall(r"(\w+): ", text) == list(cls.__struct_fields__)


@pytest.mark.parametrize(
    ("cls", "number"), [(messages.RequestClaim, 3), (Descriptor, 2), (Manifest, 10), (Payload, 10), (Delta, 10)]
)
def test_the_fields_of_what_is_signed_are_documented_in_wire_order(cls: type[msgspec.Struct], number: int) -> None:
    fields = list(cls.__struct_fields__)
    names = [name for row in rows(section(number)) for name in row[0].split(", ")]
    assert [name for name in names if name in fields] == fields


SHORT = [Head, messages.Receipt, Finding, PolicyHead, peers.PeerRecord, control.Authority]
SHORT += [membership.Invite]


@pytest.mark.parametrize("cls", SHORT, ids=lambda cls: cls.__name__)
def test_the_fields_of_short_values_are_documented_in_wire_order(cls: type[msgspec.Struct]) -> None:
    (text,) = re.findall(rf"\b{cls.__name__}: ((?:.|\n(?!\n))*?)\.(?:\s|$)", PROTOCOL)
    words = re.findall(r"\w+", text)
    places = [words.index(field) for field in cls.__struct_fields__]
    assert places == sorted(places)


def test_the_reasons_of_control_are_documented_in_the_order_of_the_checks() -> None:
    listed = [row[0].strip("`") for row in rows(section(14)) if len(row) == 2 and row[0].startswith("`")]
    assert listed == [reason.value for reason in control.ControlReason]


@pytest.mark.parametrize(("cls", "part"), [(control.ControlRequest, 2), (control.ControlReply, 3)])
def test_the_fields_of_control_are_documented_in_wire_order(cls: type[msgspec.Struct], part: int) -> None:
    text = section(14).split(f"\n### 14.{part} ")[1].split("\n### ")[0]
    table = text.split(f"| field of {cls.__name__} ")[1].split("\n\n")[0]
    assert [row[0] for row in rows(table)][1:] == list(cls.__struct_fields__)


@pytest.mark.parametrize("purpose", control.PURPOSES)
def test_what_is_asked_and_answered_is_documented_in_wire_order(purpose: str) -> None:
    ((_, asked, answered),) = [row for row in rows(section(14)) if len(row) == 3 and row[0] == f"`{purpose}`"]
    for text, union in ((asked, control.Ask), (answered, control.Body)):
        (cls,) = [one for one in get_args(union) if one.__struct_config__.tag == purpose]
        assert re.findall(r"(\w+): ", text) == list(cls.__struct_fields__)


def test_the_endpoints_are_those_of_the_coordinator() -> None:
    documented = set()
    for row in rows(section(3)):
        for method, path in re.findall(r"`?(GET|POST|PUT) (/[\w/{}.]+)", row[0]):
            documented.add((method, path))
        documented |= {("GET", path) for path in re.findall(r"`GET (/metrics|/health)`", row[0])}
    served = {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS} | {("GET", "/openapi.json")}
    same_name = {(method, re.sub(r"\{\w+\}", "{}", path)) for method, path in served}
    assert {(method, re.sub(r"\{\w+\}", "{}", path)) for method, path in documented} == same_name


def test_the_constants_are_the_codes() -> None:
    assert TABLE_DIGEST in section(4)
    assert f"<= {MAX_CLOCK_SKEW_SECONDS} s" in section(3)
    assert f"{MAX_LOGPROB:.0e}".replace("e-0", "e-") in section(6)


SIGNED = [
    (DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION),
    (peers.PEER_DOMAIN, peers.PEER_VERSION),
    (membership.INVITE_DOMAIN, membership.INVITE_VERSION),
    (messages.REQUEST_DOMAIN, messages.MESSAGE_VERSION),
    (messages.RECEIPT_DOMAIN, messages.MESSAGE_VERSION),
]


@pytest.mark.parametrize(("domain", "version"), SIGNED, ids=[domain for domain, _ in SIGNED])
def test_what_is_signed_is_documented_with_its_version(domain: str, version: int) -> None:
    (row,) = [row for row in rows(section(1)) if row[0] == f"`{domain}`"]
    assert row[1] == str(version)


def test_the_limits_of_membership_are_the_codes() -> None:
    """A client of another implementation solves by this page: a bound of its own would have it refused."""
    limits = {row[0]: row[1] for row in rows(section(12))}
    days = membership.MAX_INVITE_SECONDS // 86_400
    sizes = f"{membership.MAX_INVITE_BYTES // 1024} KiB, its envelope {membership.MAX_INVITE_ENVELOPE_BYTES} bytes"
    assert limits["Invite"] == f"{sizes}, good for {days} days, {membership.MAX_INVITED_KEYS} keys"
    said = f"{membership.MAX_BITS} bits; a salt is taken for {2 * by_work.SALT_SECONDS} s, and a puzzle given up after"
    assert limits["proof of work"] == f"{said} {proof_of_work.MOST_SECONDS:.0f} s"
    text = section(3).split("### 3.7 ")[1]
    assert f"issued_at + {days} days" in text
    assert f"issued_at - {membership.MAX_SKEW_SECONDS} s" in text
    assert f"told for {by_work.SALT_SECONDS} s" in text
    assert f"last {by_work.WAITING_SECONDS:.0f} s" in text


def test_a_node_reads_the_largest_page_of_the_log() -> None:
    """It ends with the entry that makes it so long. An auditor who reads less can audit no run of that size."""
    (said,) = re.findall(r"at most (\d+), and none after the one that makes it (\d+) MiB", section(3))
    entries, size = int(said[0]), int(said[1]) * 2**20
    assert (entries, size) == (log.MAX_ENTRIES_PER_READ, log.MAX_BYTES_PER_READ)
    assert LOG_ENTRIES.max_reply_bytes >= size + messages.MAX_ENTRY_BYTES + entries, "a line feed after each"


def test_the_limits_of_peers_are_the_codes() -> None:
    """What one implementation sends and the other refuses would end their links, and have honest peers shunned."""
    text = section(13)
    assert f"issued_at + {peers.MAX_VALID_SECONDS};" in text
    assert f"at most {peers.MAX_SKEW_SECONDS} s ahead" in text
    assert f"array of at most {peers.MAX_ADDRESSES} PeerAddress" in text
    assert f"1 .. {peers.MAX_JOIN_PEERS} addresses" in text
    assert f"`{peers.PEER_DOMAIN}`, version {peers.PEER_VERSION}," in text
    limits = {row[0]: row[1] for row in rows(section(12))}
    assert f"{peers.MAX_PEER_BYTES // 1024} KiB, {peers.MAX_ADDRESSES} addresses" in limits["PeerRecord"]
    assert limits["string to join by"] == f"{peers.MAX_JOIN_BYTES} characters, {peers.MAX_JOIN_PEERS} peers"
    assert board.MAX_ENVELOPE_BYTES == 256 * 1024 + 512
    assert limits["frame of a link"].startswith("256 KiB + 512 bytes")


@pytest.mark.system
def test_the_times_of_links_are_the_codes() -> None:
    links = pytest.importorskip("node.p2p.links")
    text, limits = section(13), {row[0]: row[1] for row in rows(section(12))}
    assert f"`{links.PROTOCOL}`" in text
    assert f"at most {links.GREETING_PEERS} peers that it has reached" in text
    assert f"at least {links.DESCRIPTOR_GAP_SECONDS} s after the last one" in text
    assert f"empty frame after {links.KEEPALIVE_SECONDS:.0f} s" in text
    assert f"nothing comes for {links.IDLE_SECONDS:.0f} s" in text
    assert f"not complete {links.FRAME_SECONDS:.0f} s after its first byte" in text
    assert f"Where both did within {links.SIMULTANEOUS_SECONDS:.0f} s" in text
    assert f"complete within {links.FRAME_SECONDS:.0f} s" in limits["frame of a link"]
    assert f"{links.FRAMES_PER_SECOND:.0f} a second, {links.BURST_FRAMES} at once" in limits["frame of a link"]
    assert f"shunned for {peer_book.SHUNNED_SECONDS / 60:.0f} minutes" in text
    assert f"(here {joining.REFRESH_SECONDS:.0f} s)" in text


# -- run.toml


def settings() -> Iterator[tuple[str, str, str, str]]:
    """(table, key, type, default) of every setting, as the document has to spell them."""
    yield from _fields("Top level", RunSpec)
    for field in msgspec.structs.fields(RunSpec):
        kind = msgspec.inspect.type_info(field.type)
        if isinstance(kind, msgspec.inspect.VarTupleType):
            yield from _fields(f"[[{field.name}]]", kind.item_type.cls)
        elif isinstance(kind, msgspec.inspect.StructType):
            yield from _fields(f"[{field.name}]", kind.cls)
    yield from _fields("[environments.length]", LengthSpec)
    yield from _fields("[environments.package]", PackageSpec)
    yield from _fields("[environments.problems]", ProblemsSpec)
    yield from _fields("[environments.dataset]", DatasetSpec)
    yield from _fields("[environments.thinking]", ThinkingSpec)
    yield from _fields("[environments.tool]", ToolSpec)
    yield from _fields("[batch.pools]", PoolsSpec)
    yield from _fields("[limits.honest.STATISTIC]", LevelSpec)
    yield from _fields("[training.lora]", LoraSpec)
    yield from _fields("[training.teacher]", TeacherSpec)


_PATTERNS = {r"^3\.[0-9]{1,2}$": 'text such as `"3.11"`'}


def _fields(table: str, cls: type[msgspec.Struct]) -> Iterator[tuple[str, str, str, str]]:
    for field in msgspec.structs.fields(cls):
        kind = msgspec.inspect.type_info(field.type)
        if isinstance(kind, msgspec.inspect.UnionType):
            kinds = [one for one in kind.types if not isinstance(one, msgspec.inspect.NoneType)]
            if len(kinds) > 1:  # data, or what run.toml calls it
                yield table, field.name, "a name, or a table", '`"none"`'
                continue
            (kind,) = kinds
        items = getattr(kind, "item_type", kind)
        if not isinstance(items, msgspec.inspect.StructType):
            yield table, field.name, _type(kind), _default(field)


def _type(kind: object) -> str:
    match kind:
        case msgspec.inspect.IntType(ge=low, le=high):
            return f"integer, {low} .. {high}"
        case msgspec.inspect.FloatType():
            bounds = [(">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le)]
            shown = [f"{sign} {_number(bound)}" for sign, bound in bounds if bound is not None]
            return ", ".join(["number", *shown])
        case msgspec.inspect.StrType(max_length=high) | msgspec.inspect.BytesType(max_length=high):
            is_text = isinstance(kind, msgspec.inspect.StrType)
            shown = f"text, {kind.min_length} .. {high} characters" if is_text else f"base64 of at most {high} bytes"
            has_pattern = is_text and kind.max_length is None
            return _PATTERNS.get(kind.pattern, "64 hexadecimal digits") if has_pattern else shown
        case msgspec.inspect.LiteralType(values=values):
            # msgspec sorts the alternatives; the document's order is free.
            return " ".join(sorted(values))
        case msgspec.inspect.VarTupleType():
            return _list(kind)
        case msgspec.inspect.BoolType() | msgspec.inspect.DictType():
            is_table = isinstance(kind, msgspec.inspect.DictType)
            return "table of texts, numbers and booleans" if is_table else "true or false"
    raise AssertionError(f"no words for {kind}")


def _list(kind: msgspec.inspect.VarTupleType) -> str:
    if isinstance(kind.item_type, msgspec.inspect.LiteralType):
        values = ", ".join(f'`"{value}"`' for value in sorted(kind.item_type.values))
        return f"list of at most {kind.max_length} of {values}"
    items = _type(kind.item_type).replace("integer", "integers").replace("text", "texts")
    return f"list of {kind.min_length} .. {kind.max_length} {items}"


def _number(bound: float) -> str:
    return f"{bound:g}".replace("e+09", "e9")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()}`"
    if field.default is msgspec.NODEFAULT:
        return "required"
    if field.default in {None, msgspec.UNSET}:
        return "none"
    if isinstance(field.default, tuple):
        return f"`{json.dumps(field.default)}`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{json.dumps(field.default)}`" if isinstance(field.default, str) else f"`{field.default}`"


def documented(table: str) -> dict[str, list[str]]:
    text = RUN_TOML.split(f"\n## {table}\n")[1].split("\n## ")[0]
    return {row[0].strip("`"): row for row in rows(text) if row[0].startswith("`")}


def test_every_setting_is_documented_with_its_type_and_default() -> None:
    """An operator sets limits by this page: a wrong default here rejects somebody's honest work."""
    for table, key, kind, default in settings():
        _, shown, shown_default, meaning, when = documented(table)[key]
        if shown.startswith("`"):
            shown = " ".join(sorted(re.findall(r'"([^"]+)"', shown)))
        assert (shown, shown_default) == (kind, default), f"{table}.{key}"
        assert meaning and when, f"{table}.{key}"  # noqa: PT018


def test_nothing_is_documented_that_does_not_exist() -> None:
    tables = re.findall(r"^## (.+)$", RUN_TOML, flags=re.MULTILINE)
    assert {(table, key) for table in tables for key in documented(table)} == {row[:2] for row in settings()}


def test_the_pages_example_is_a_run() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", RUN_TOML, flags=re.DOTALL)
    assert parse_run_toml(example).environments[0].name == "arithmetic"
