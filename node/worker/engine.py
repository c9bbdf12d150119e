"""The worker's engine: policy loading and switching, slots, challenges.

A slot's content is derived from the worker's own verified manifest (docs/protocol.md, section 5); the lease gives only
the slot's number. Results must pass the verifier's model-free checks, so that an engine's fault is not submitted under
this node's name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import UNSET, UnsetType

from node.engines.base import BrokenPolicy, DoesNotFit, Engine, EngineError, SampleRequest, requests_for
from node.environments import NO_DATASETS, check_replies, load_environments, missing_environments
from node.environments.base import EnvironmentFault
from node.episodes.expected import expected_of
from node.errors import EngineFailed
from node.policy.errors import PolicyError, UnreadablePolicy
from node.protocol.challenge import CHALLENGE_SLOT, challenge_manifest, challenge_spec, fits
from node.protocol.control import AskChallenge, ChallengeBody
from node.protocol.messages import Lease, candidate_of
from node.protocol.profiles import Hardware
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.protocol.submission import Expected, Rollout, check_rollouts
from node.sandbox.errors import SandboxFailed
from node.submission.writer import write_rollouts
from node.worker.events import NO_OBSERVER, EventKind, Observer
from node.worker.policies import PolicyFeed
from shardcast.errors import ShardcastError

log = logging.getLogger(__name__)


class UnusablePolicy(EngineFailed):
    """A policy that this machine cannot load; the engine keeps its present one."""

    code = "policy_unusable"


class ChallengeUnavailable(Exception):
    """A challenge that cannot be answered now, or not under this run's rules."""


class EngineHost:
    """One engine under a run's rules; `switches` counts policies loaded while slots were active."""

    def __init__(
        self,
        engine: Engine,
        feed: PolicyFeed,
        *,
        spec: RunSpec,
        run_id: str,
        datasets: Mapping[str, Path] = NO_DATASETS,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.name = engine.name
        self.switches = 0
        self.restarts = 0
        self.segments = 0
        self._engine = engine
        self._feed = feed
        self._spec = spec
        self._run_id = run_id
        self._lead = spec.sampling.max_version_lead
        self._observer = observer
        self._environments = load_environments(spec, datasets, some=True)
        check_replies(self._environments)

    async def use_datasets(self, datasets: Mapping[str, Path]) -> None:
        """Draw problems from these files from now on, verified once more; raises as `load_environments`."""
        self._environments = await asyncio.to_thread(load_environments, self._spec, datasets, some=True)

    async def hardware(self) -> Hardware | UnsetType:
        """Return what the engine says that it computes on; unset where it cannot tell, which keeps nobody from work."""
        try:
            return await self._engine.hardware()
        except Exception as error:  # noqa: BLE001  (a driver's library may raise anything)
            log.info("The run's pages will not show this machine's hardware, which cannot be told: %s", error)
            return UNSET

    @property
    def lacks(self) -> tuple[int, ...]:
        """The environments of the run, by their place in its list, that are not installed here."""
        return missing_environments(self._environments)

    @property
    def version(self) -> int | None:
        """The policy version in the engine; None before the first, and after a crash."""
        return self._engine.version

    def serves(self, leased: int) -> bool:
        """Return whether a slot of policy `leased` may begin on the engine as it is."""
        return self.version is not None and leased <= self.version <= leased + self._lead

    def may_take_over(self, version: int, *, under_way: Iterable[int]) -> bool:
        """Return whether policy `version` may be loaded while slots leased at `under_way` are active."""
        return all(version <= leased + self._lead for leased in under_way)

    def best_for(self, leased: int) -> int:
        """Return the newest policy held that a slot of policy `leased` may be generated with."""
        return max(held for held in (leased, *self._feed.versions()) if leased <= held <= leased + self._lead)

    async def load(self, version: int, *, slots: int) -> None:
        """Load a policy while `slots` slots are active; raises EngineFailed, or UnusablePolicy.

        A policy that cannot be loaded is dropped: not retried, and not offered for leases.
        """
        started = time.monotonic()
        try:
            path = await self._feed.file(version)
        except ShardcastError as error:
            raise UnusablePolicy(f"Policy {version} is not on disk any more: {error}.") from error
        if path is None:
            raise UnusablePolicy(f"Policy {version} is not on disk any more.")
        try:
            await self._engine.load(path, version=version)
        except UnreadablePolicy as error:  # the next policy may have come meanwhile: this one is no worse for it
            raise UnusablePolicy(f"Policy {version} cannot be read here: {error}.") from error
        except PolicyError as error:
            self._feed.drop(version)
            raise UnusablePolicy(f"Policy {version} cannot be loaded here: {error}.") from error
        except Exception as error:
            if isinstance(error, BrokenPolicy):
                self._feed.drop(version)
            raise _failed(f"did not take policy {version}", error) from error
        self.switches += slots > 0
        seconds = time.monotonic() - started
        log.info(
            "policy %d is loaded, after %.1f s%s",
            version,
            seconds,
            f"; {slots} active slots continue with it" if slots else "",
        )
        self._observer.notify(EventKind.LOADED, policy=version, seconds=round(seconds, 3), slots=slots)

    async def group(self, lease: Lease, *, ended: Callable[[], None]) -> list[Rollout]:
        """Generate and check a slot's rollouts; `ended` is called after each completion.

        Raises EngineFailed, EnvironmentFault and SandboxFailed. Cancelling aborts the engine's work on the slot.
        """
        try:
            expected = self._expected(lease)
            _check_prompt(expected, self._spec)
            requests = requests_for(expected)
            rollouts = await self._engine.generate(requests, on_finished=ended)
        except (EnvironmentFault, SandboxFailed):
            raise
        except Exception as error:
            if isinstance(error, (BrokenPolicy, PolicyError)) and self.version is not None:
                self._feed.drop(self.version)  # it would fail at every slot, or its tokenizer at every prompt
            raise _failed(f"failed at slot {lease.slot} of policy {lease.version}", error) from error
        try:
            await asyncio.to_thread(check_rollouts, rollouts, expected=expected, spec=self._spec)
        except Refusal as refusal:
            raise EngineFailed(
                f"The engine made something else than slot {lease.slot} of policy {lease.version} asks for "
                f"({refusal.reason}): {refusal.detail}"
            ) from refusal
        self.segments += sum(len(rollout.segment_versions) for rollout in rollouts)
        return rollouts

    async def challenge(self, ask: AskChallenge, *, node: bytes, nonce: str) -> ChallengeBody | None:
        """Generate a challenge's completions under the loaded policy; None if that changed meanwhile.

        Raises ChallengeUnavailable, and EngineError from the engine itself.
        """
        version = self.version
        held = None if version is None else self._feed.get(version)
        if version is None or held is None:
            raise ChallengeUnavailable("The engine holds no policy.")
        rules = challenge_spec(self._spec, ask)
        manifest = challenge_manifest(run_id=self._run_id, manifest_digest=held.manifest_digest, node=node, nonce=nonce)
        try:
            expected = expected_of(
                rules,
                self._engine.policy,
                self._environments,
                run_id=self._run_id,
                version=version,
                manifest_digest=manifest,
                slot=CHALLENGE_SLOT,
            )
            _check_prompt(expected, rules)
        except EnvironmentFault as fault:  # the asker would refuse the answer, or no engine takes it
            raise ChallengeUnavailable(f"The challenge's problem is for nobody: {fault}.") from fault
        if not fits(rules, samples=ask.samples, prompt_tokens=len(expected.prompt_ids)):
            raise ChallengeUnavailable("The run's proofs make the answer too large; ask for fewer samples or tokens.")
        most, prompt = rules.sampling.max_new_tokens, tuple(expected.prompt_ids)
        rollouts = await self._engine.generate([SampleRequest(prompt, seed, most) for seed in expected.seeds])
        if any(rollout.segment_versions != [version] for rollout in rollouts):
            return None
        file = await asyncio.to_thread(write_rollouts, rollouts)
        return ChallengeBody(version=version, manifest_digest=held.manifest_digest, rollouts=file)

    async def restart(self) -> None:
        """Stop the engine after a failure; the next `load` starts it again."""
        self.restarts += 1
        await self.close()

    async def close(self) -> None:
        """Stop the engine, logging errors."""
        try:
            await self._engine.close()
        except Exception:
            log.exception("the engine did not stop cleanly")

    def _expected(self, lease: Lease) -> Expected:
        # The tokenizer is the run's, so any policy gives the same prompt.
        return expected_of(
            self._spec,
            self._engine.policy,
            self._environments,
            run_id=self._run_id,
            version=lease.version,
            manifest_digest=lease.manifest_digest,
            slot=lease.slot,
            candidate=candidate_of(lease),
        )


def _check_prompt(expected: Expected, spec: RunSpec) -> None:
    """Raise EnvironmentFault for a prompt outside the run's limits, which no engine would take."""
    tokens, most = len(expected.prompt_ids), expected.most_prompt_tokens(spec.sampling)
    if not 1 <= tokens <= most:
        raise EnvironmentFault(
            f"its prompt has {tokens} tokens, 1 to {most} are allowed (max_prompt_tokens)",
            code="prompt_too_long",
        )


def _failed(what: str, error: Exception) -> EngineFailed:
    said = str(error).strip().rstrip(".")
    if not isinstance(error, EngineError):  # whose messages are sentences
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    code = error.code if isinstance(error, DoesNotFit) else None
    return EngineFailed(f"The engine {what}: {said}.", code=code)
