"""Length targets over any environment: the prompt asks for a number of tokens, and missing it costs reward.

After INTELLECT-2 (arXiv 2505.07291, length rewards) and L1 (arXiv 2503.04697). The target of a problem is drawn from
its index, so worker, verifier and auditor ask for the same (docs/protocol.md, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from node.environments.base import Conversation, Environment, EnvironmentFault, Problem, draws
from node.protocol.run import EnvironmentSpec, LengthSpec

_FORMS = {"sentence": "Think for about {} tokens before you answer.\n", "short": "T:{}\n"}
"""How a prompt asks; the short one is for the character policy, to which a sentence is half of its prompt."""


@dataclass(frozen=True, slots=True)
class LengthTargets:
    """An environment whose problems name a target length besides; its rewards are those of `grading.grade`."""

    inner: Environment
    length: LengthSpec

    @property
    def name(self) -> str:
        return self.inner.name

    def problem(self, index: int) -> Problem:
        """The inner problem with the request before what it says itself.

        `data`: `target_tokens`, and `asked`, the inner problem.
        """
        asked = self.inner.problem(index)
        target = self.length.targets[next(draws("length", index)) % len(self.length.targets)]
        request = _FORMS[self.length.form].format(target)
        prompt = asked.prompt[: asked.opening] + request + asked.prompt[asked.opening :]
        return Problem(prompt, {"target_tokens": target, "asked": asked}, opening=asked.opening)

    def reward(self, problem: Problem, completion: str) -> float:  # noqa: ARG002  (the interface's arguments)
        raise EnvironmentFault(f"{self.name} has length targets: its rewards need tokens, not text", code="no_length")

    def after_penalty(self, reward: float, problem: Problem, *, tokens: int) -> float:
        """`reward` less the penalty for `tokens` instead of the target, not below 0."""
        missed = abs(tokens - int(problem.data["target_tokens"]))
        return max(reward - self.length.penalty * missed, 0.0)


@dataclass(frozen=True, slots=True)
class ConversationLengthTargets(LengthTargets):
    """The same over an environment of several turns: the target is for all of them together."""

    conversation: Conversation

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        return self.conversation.reply(problem.data["asked"], turns)

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self.reward(problem, turns[-1])


def with_lengths(environment: Environment, spec: EnvironmentSpec) -> Environment:
    """`environment` with the length targets of `spec`, if it has any."""
    if spec.length is None:
        return environment
    if isinstance(environment, Conversation):
        return ConversationLengthTargets(environment, spec.length, environment)
    return LengthTargets(environment, spec.length)
