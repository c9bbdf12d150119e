"""A run's rules: an operator's typing errors are named, and a contributor joins the run it was told to join."""

from __future__ import annotations

import json

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from locations import VECTORS_FOLDER

from node.protocol.run import (
    DESCRIPTOR_DOMAIN,
    DESCRIPTOR_VERSION,
    MAX_DESCRIPTOR_BYTES,
    Descriptor,
    EnvironmentSpec,
    LoraSpec,
    ProblemsSpec,
    RunSpec,
    open_descriptor,
    parse_run_toml,
    run_id_of,
)
from shardcast.envelope import seal
from shardcast.errors import BadSignature, Malformed, Stale
from shardcast.wire import decode, encode

VECTORS = json.loads((VECTORS_FOLDER / "protocol" / "run.json").read_text())
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
RUN = run_id_of(KEY.public_key().public_bytes_raw())
SPEC = RunSpec(name="t", environments=(EnvironmentSpec(name="arithmetic"),))
DESCRIPTOR = Descriptor(
    run_id=RUN,
    version=1,
    spec=SPEC,
    endpoints=("http://127.0.0.1:2",),
    relays=("http://127.0.0.1:1",),
    peers=(),
    head=None,
    revoked=(),
    issued_at=100,
    expires_at=200,
)
SMALLEST = 'name = "t"\n[[environments]]\nname = "arithmetic"\n'
FINITE = SMALLEST + "problems = { count = 8 }\n"


def sealed(descriptor: Descriptor = DESCRIPTOR, *, key: Ed25519PrivateKey = KEY, **changes: object) -> bytes:
    settings = {"domain": DESCRIPTOR_DOMAIN, "version": DESCRIPTOR_VERSION} | changes
    return seal(encode(descriptor), key=key, **settings)


def test_the_smallest_run_toml_is_the_documented_defaults() -> None:
    assert parse_run_toml(SMALLEST) == SPEC


def test_a_spec_has_one_digest_whatever_way_it_was_written() -> None:
    spelled = SMALLEST + "weight = 1\n[sampling]\ntemperature = 1\nmax_new_tokens = 0x30\n[batch]\n"
    assert parse_run_toml(spelled).digest == SPEC.digest
    assert decode(RunSpec, encode(SPEC), max_bytes=10_000).digest == SPEC.digest


def test_a_run_without_finite_sets_and_pools_is_spelt_as_before_there_were_any() -> None:
    """Else a coordinator that is updated would refuse its own run: the rules' digest is the log's first entry."""
    text = encode(SPEC)
    assert b"problems" not in text
    assert b"pools" not in text
    finite = parse_run_toml(FINITE + "[batch.pools]\nhard = 2\n")
    assert decode(RunSpec, encode(finite), max_bytes=10_000) == finite
    assert len({SPEC.digest, parse_run_toml(FINITE).digest, finite.digest}) == 3


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("loss", '[training]\nloss = "mine==1.0"\n'),
        ("teacher", '[training.teacher]\nfolder = "big"\ncoefficient = 0.1\n'),
    ],
)
def test_a_run_without_a_loss_of_its_own_or_a_teacher_is_spelt_as_before(field: str, text: str) -> None:
    assert f'"{field}":'.encode() not in encode(SPEC)
    spec = parse_run_toml(SMALLEST + text)
    assert decode(RunSpec, encode(spec), max_bytes=10_000) == spec
    assert spec.digest != SPEC.digest


def test_a_run_without_adapters_is_spelt_as_before_there_were_any() -> None:
    assert b"lora" not in encode(SPEC)
    adapted = parse_run_toml(SMALLEST + "[training.lora]\nrank = 8\nalpha = 16\n")
    assert decode(RunSpec, encode(adapted), max_bytes=10_000) == adapted
    assert adapted.training.lora == LoraSpec(rank=8, alpha=16.0)
    assert (
        len({SPEC.digest, adapted.digest, parse_run_toml(SMALLEST + "[training.lora]\nrank = 4\nalpha = 16\n").digest})
        == 3
    )


def test_the_bitmaps_of_a_run_fit_its_descriptor() -> None:
    """What no peer reads must not be signed."""
    full = ProblemsSpec(count=65_536, kept=b"\xff" * 8192)
    most = tuple(EnvironmentSpec(name="arithmetic", problems=full) for _ in range(12))
    spec = RunSpec(name="t", environments=most)
    assert len(encode(msgspec.structs.replace(DESCRIPTOR, spec=spec))) < MAX_DESCRIPTOR_BYTES
    with pytest.raises(ValueError, match="together"):
        RunSpec(name="t", environments=(*most, EnvironmentSpec(name="reverse", problems=full)))


def test_every_setting_is_part_of_the_digest() -> None:
    """A limit that could change without changing the digest could change under a worker's feet."""
    seen = {SPEC.digest}
    for field in ("seed", "model", "sampling", "proofs", "batch", "limits", "training", "broadcast"):
        value = getattr(SPEC, field)
        if isinstance(value, int):
            seen.add(msgspec.structs.replace(SPEC, **{field: value + 1}).digest)
            continue
        changed = 0
        for name in value.__struct_fields__:
            for other in (not getattr(value, name), 3, 5, "float16", 0.125):
                try:
                    raw = msgspec.to_builtins(SPEC)
                    raw[field][name] = other
                    seen.add(msgspec.convert(raw, RunSpec).digest)
                    changed += 1
                except msgspec.ValidationError:
                    continue
        assert changed >= len(value.__struct_fields__) - 1
    assert len(seen) > 40


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[[environments]]\nname = 'a'\n", "name"),
        ("name = 't'\n", "environments"),
        ("name = 't'\nenvironments = []\n", "environments"),
        ("name = ''\n[[environments]]\nname = 'a'\n", "name"),
        (SMALLEST + "weight = 0\n", "weight"),
        (SMALLEST + "weigth = 1\n", "weigth"),
        (SMALLEST + "[sampling]\ntemperature = 0\n", "sampling.temperature"),
        (SMALLEST + "[sampling]\ntemperature = nan\n", "sampling.temperature"),
        (SMALLEST + "[sampling]\ngroup_size = 1\n", "sampling.group_size"),
        (SMALLEST + "[sampling]\ngroup_size = '8'\n", "sampling.group_size"),
        (SMALLEST + "[sampling]\ngroup_size = true\n", "sampling.group_size"),
        (SMALLEST + "[sampling]\ngroupsize = 8\n", "groupsize"),
        (SMALLEST + "[proofs]\nscheme = 'toploc/2'\n", "proofs.scheme"),
        (SMALLEST + "[proofs]\nscheme = 'sketch/1+toploc/1'\n", "proofs.scheme"),
        (SMALLEST + "[proofs]\nsketch_step = 0\n", "proofs.sketch_step"),
        (SMALLEST + "[model]\ndtype = 'fp8'\n", "model.dtype"),
        (SMALLEST + "[limits]\nlogprob_error = nan\n", "limits.logprob_error"),
        (SMALLEST + "[limits]\ntoken_margin = inf\n", "limits.token_margin"),
        (SMALLEST + "[limits]\nmantissa_mean = -1\n", "limits.mantissa_mean"),
        (SMALLEST + "[limits]\nmax_submission_bytes = 3_000_000_000\n", "limits.max_submission_bytes"),
        (SMALLEST + "[limits]\nfalse_rejections = 0\n", "limits.false_rejections"),
        (SMALLEST + "[limits]\nfalse_rejections = 1\n", "limits.false_rejections"),  # every honest group
        (SMALLEST + "[limits.honest.tokens]\nmean = 0\nvariance = 1\nlargest = 1\n", "tokens"),
        (SMALLEST + "[limits.honest.margin]\nmean = 0\nvariance = 1\n", "largest"),
        (SMALLEST + "[limits.honest.margin]\nmean = 0\nvariance = 0\nlargest = 1\n", "limits.honest.margin.variance"),
        (SMALLEST + "[limits.honest.margin]\nmean = 1\nvariance = 1\nlargest = 1\n", "largest must exceed mean"),
        (SMALLEST + "[training]\nlearning_rate = 0\n", "training.learning_rate"),
        (SMALLEST + "[training]\nbeta1 = 1\n", "training.beta1"),
        (SMALLEST + "[batch]\nmax_async = -1\n", "batch.max_async"),
        (SMALLEST + "[environments.arguments]\nx = nan\n", "environments[0].arguments"),
        (SMALLEST + "[environments.arguments]\nx = 1e300\n", "environments[0].arguments"),
        (SMALLEST + "[environments.arguments]\nx = 9007199254740992\n", "environments[0].arguments"),
        (SMALLEST + "[environments.arguments]\nx = 1979-05-27\n", "environments[0].arguments"),
        (SMALLEST + "[environments.arguments]\nx = [1]\n", "environments[0].arguments"),
        (SMALLEST + "length = { targets = [] }\n", "environments[0].length.targets"),
        (SMALLEST + "length = { targets = [0] }\n", "environments[0].length.targets"),
        (SMALLEST + "length = { targets = [16], penalty = 0 }\n", "environments[0].length.penalty"),
        (SMALLEST + "length = { targets = [16], penalty = 1.5 }\n", "environments[0].length.penalty"),
        (SMALLEST + "length = { target = [16] }\n", "target"),
        (SMALLEST + "length = { targets = [16, 49] }\n", "max_new_tokens"),
        (SMALLEST + "max_prompt_tokens = 129\n", "at most sampling.max_prompt_tokens"),
        (SMALLEST + "max_new_tokens = 49\n", "at most sampling.max_new_tokens"),
        (SMALLEST + "max_new_tokens = 0\n", "environments[0].max_new_tokens"),
        (SMALLEST + "max_new_tokens = 20\nlength = { targets = [16, 21] }\n", "at most max_new_tokens"),
        (SMALLEST + "stop = []\n", "environments[0].stop"),
        (SMALLEST + "stop = ['']\n", "environments[0].stop"),
        (SMALLEST + f"stop = ['{'x' * 65}']\n", "environments[0].stop"),
        (SMALLEST + f"stop = {['x'] * 9}\n", "environments[0].stop"),
        (SMALLEST + 'stop = ["a\\ufffd"]\n', "U+FFFD"),
        (SMALLEST + "thinking = { tokens = 48 }\n", "below max_new_tokens"),
        (SMALLEST + "thinking = { tokens = 47 }\n", "with room for thinking.end"),
        (SMALLEST + "max_new_tokens = 9\nthinking = { tokens = 8 }\n", "with room for thinking.end"),
        (SMALLEST + "thinking = { tokens = 8, end = 'Done.' }\n", "must hold </think>"),
        (SMALLEST + "problems = { count = 0 }\n", "environments[0].problems.count"),
        (SMALLEST + "problems = { count = 1048577 }\n", "environments[0].problems.count"),
        (SMALLEST + "problems = { count = 9, kept = '/w==' }\n", "one bit for each of count"),
        (SMALLEST + "problems = { count = 8, kept = '/wA=' }\n", "one bit for each of count"),
        (SMALLEST + "problems = { count = 7, kept = '/w==' }\n", "zeros after them"),
        (SMALLEST + "problems = { count = 8, kept = 'AA==' }\n", "must keep a problem"),
        (SMALLEST + "problems = { count = 8, kept = '!' }\n", "environments[0].problems.kept"),
        (SMALLEST + "[batch.pools]\n", "needs an environment with environments.problems"),
        (FINITE + "[batch.pools]\neasy = 0\nnormal = 0\nhard = 0\n", "must have a share"),
        (FINITE + "[batch.pools]\neasy_from = 0.5\nhard_to = 0.5\n", "below easy_from"),
        (FINITE + "[batch.pools]\nhard = -1\n", "batch.pools.hard"),
        (SMALLEST + "[training]\nloss = ''\n", "training.loss"),
        (SMALLEST + "[training.teacher]\nfolder = 'big'\n", "coefficient"),
        (SMALLEST + "[training.teacher]\nfolder = ''\ncoefficient = 1\n", "training.teacher.folder"),
        (SMALLEST + "[training.teacher]\nfolder = 'big'\ncoefficient = 0\n", "training.teacher.coefficient"),
        (SMALLEST + "[training.lora]\nalpha = 16\n", "rank"),
        (SMALLEST + "[training.lora]\nrank = 8\n", "alpha"),
        (SMALLEST + "[training.lora]\nrank = 0\nalpha = 16\n", "training.lora.rank"),
        (SMALLEST + "[training.lora]\nrank = 1025\nalpha = 16\n", "training.lora.rank"),
        (SMALLEST + "[training.lora]\nrank = 8\nalpha = 0\n", "training.lora.alpha"),
        (SMALLEST + "[training.lora]\nrank = 8\nalpha = 16\ntargets = []\n", "training.lora.targets"),
        (SMALLEST + "[training.lora]\nrank = 8\nalpha = 16\ntargets = ['lm_head']\n", "training.lora.targets"),
        (SMALLEST + "[training.lora]\nrank = 8\nalpha = 16\ntargets = ['q_proj', 'q_proj']\n", "twice"),
        (SMALLEST + "[training]\noptimizer = 'muon'\nlora = { rank = 8, alpha = 16 }\n", "needs the optimizer adamw"),
        ("sampling = 3\n" + SMALLEST, "sampling"),
        (SMALLEST + "[extra]\n", "extra"),
        (SMALLEST + "[batch]\nmax_async = 7\n", "keep_versions"),
    ],
)
def test_a_wrong_setting_is_named(text: str, key: str) -> None:
    with pytest.raises(Malformed) as caught:
        parse_run_toml(text)
    assert caught.value.code == "bad_run_toml"
    assert key in str(caught.value)


@pytest.mark.parametrize(
    "text", ["name =", "name = 't'\nname = 't'\n", "\x00", "x = " + "[" * 50_000, "seed = " + "1" * 5000, "{}"]
)
def test_what_is_not_toml_is_refused(text: str) -> None:
    with pytest.raises(Malformed) as caught:
        parse_run_toml(text)
    assert caught.value.code == "bad_run_toml"


def test_every_accepted_spec_can_be_read_back_by_a_worker() -> None:
    text = SMALLEST + "[environments.arguments]\na = 1\nb = 1.5\nc = true\nd = 'x'\ne = -9007199254740991\nf = 1e15\n"
    spec = parse_run_toml(text)
    assert decode(RunSpec, encode(spec), max_bytes=MAX_DESCRIPTOR_BYTES) == spec


def test_a_descriptor_opens_until_it_expires() -> None:
    for now in (0.0, 100.0, 199.999):
        assert open_descriptor(sealed(), run_id=RUN, now=now) == (DESCRIPTOR, KEY.public_key().public_bytes_raw())


@pytest.mark.parametrize("now", [200.0, 1e12])
def test_an_expired_descriptor_is_refused(now: float) -> None:
    """A freeze: somebody between a worker and the run serves yesterday's relays and rules for ever."""
    with pytest.raises(Stale) as caught:
        open_descriptor(sealed(), run_id=RUN, now=now)
    assert caught.value.code == "expired"


def test_a_descriptor_signed_by_another_runs_key_is_refused() -> None:
    """A coordinator that a worker was lured to cannot pretend to be the run it asked for."""
    with pytest.raises(Malformed) as caught:
        open_descriptor(sealed(key=OTHER), run_id=RUN, now=150)
    assert caught.value.code == "wrong_run"


def test_a_descriptor_that_names_another_run_is_refused() -> None:
    with pytest.raises(Malformed) as caught:
        open_descriptor(sealed(msgspec.structs.replace(DESCRIPTOR, run_id="00" * 32)), run_id=RUN, now=150)
    assert caught.value.code == "wrong_run"


@pytest.mark.parametrize("changes", [{"domain": "swarmproof/receipt"}, {"version": DESCRIPTOR_VERSION + 1}])
def test_the_run_keys_other_signatures_are_no_descriptors(changes: dict) -> None:
    with pytest.raises(Malformed) as caught:
        open_descriptor(sealed(**changes), run_id=RUN, now=150)
    assert caught.value.code == "wrong_domain"


def test_a_flipped_byte_in_a_descriptor_is_refused() -> None:
    raw = sealed()
    for at in range(0, len(raw), 7):
        with pytest.raises((BadSignature, Malformed)):
            open_descriptor(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], run_id=RUN, now=150)


def test_an_oversized_descriptor_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(Malformed) as caught:
        open_descriptor(bytes(MAX_DESCRIPTOR_BYTES + 1000), run_id=RUN, now=150)
    assert caught.value.code == "oversized"


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://a b", "javascript:alert(1)", "http://x\n", "file:///etc"]
)
def test_a_relay_that_is_no_web_address_is_refused(url: str) -> None:
    raw = msgspec.structs.replace(DESCRIPTOR, relays=(url,))
    with pytest.raises(Malformed):
        open_descriptor(sealed(raw), run_id=RUN, now=150)


def test_a_run_id_is_a_digest_of_the_key_and_not_the_key() -> None:
    assert run_id_of(bytes.fromhex(VECTORS["run_public_key"])) == VECTORS["run_id"]
    assert VECTORS["run_id"] != VECTORS["run_public_key"]
