"""Length targets for any environment: the prompt requests a number of tokens, and missing it costs reward.

After INTELLECT-2 (arXiv 2505.07291, length rewards) and L1 (arXiv 2503.04697). A problem's target is derived from its
index, so worker, verifier and auditor use the same (docs/protocol.md, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.environments.base import Conversation, Environment, EnvironmentFault, Problem, draws
from node.protocol.run import EnvironmentSpec, LengthSpec

_FORMS = {"sentence": "Think for about {} tokens before you answer.\n", "short": "T:{}\n"}
"""Wording of the request; the short one is for the character policy, whose prompt a sentence would double."""


@dataclass(frozen=True, slots=True)
class LengthTargets:
    """An environment whose problems also name a target length; rewards are computed by `grading.grade`."""

    inner: Environment
    length: LengthSpec

    @property
    def name(self) -> str:
        return self.inner.name

    def problem(self, index: int) -> Problem:
        """Return the inner problem with the length request inserted.

        `data`: `target_tokens`, and `asked`, the inner problem.
        """
        inner_problem = self.inner.problem(index)
        target = self.length.targets[next(draws("length", index)) % len(self.length.targets)]
        request = _FORMS[self.length.form].format(target)
        prompt = inner_problem.prompt[: inner_problem.opening] + request + inner_problem.prompt[inner_problem.opening :]
        return Problem(prompt, {"target_tokens": target, "asked": inner_problem}, opening=inner_problem.opening)

    def reward(self, problem: Problem, completion: str) -> float:  # noqa: ARG002  (required by the interface)
        raise EnvironmentFault(f"{self.name} has length targets: its rewards need tokens, not text", code="no_length")

    def after_penalty(self, reward: float, problem: Problem, *, tokens: int) -> float:
        """Subtract the penalty for missing the target from `reward`, not below 0."""
        deviation = abs(tokens - int(problem.data["target_tokens"]))
        return max(reward - self.length.penalty * deviation, 0.0)


@dataclass(frozen=True, slots=True)
class ConversationLengthTargets(LengthTargets):
    """Length targets for an environment of several turns: the target is their total."""

    conversation: Conversation

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        return self.conversation.reply(problem.data["asked"], turns)

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self.reward(problem, turns[-1])


def with_lengths(environment: Environment, spec: EnvironmentSpec) -> Environment:
    """Wrap `environment` with the length targets of `spec`, if it has any."""
    if spec.length is None:
        return environment
    if isinstance(environment, Conversation):
        return ConversationLengthTargets(environment, spec.length, environment)
    return LengthTargets(environment, spec.length)
