"""A chat format around any environment: its problems and replies become a conversation (docs/chat.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.chat.errors import ChatError
from node.chat.render import render, render_reply
from node.chat.turns import whole_turn
from node.environments.base import Conversation, Environment, EnvironmentFault, Problem
from node.protocol.chat import ChatFormat


@dataclass(frozen=True, slots=True)
class Chat:
    """An environment whose problems are shown in a chat format."""

    inner: Environment
    chat: ChatFormat

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Definitions of the tools that the model is told of, in the form of OpenAI's API."""
        return ()

    def problem(self, index: int) -> Problem:
        """Return the inner problem as a conversation: its messages, or its prompt as a user's message.

        `data`: `asked`, the inner problem. Raises EnvironmentFault (code of the ChatError) for a conversation that the
        format cannot express.
        """
        asked = self.inner.problem(index)
        messages = asked.messages or ({"role": "user", "content": asked.prompt},)
        try:
            prompt, opening = render(messages, self.chat, tools=self.tools)
        except ChatError as error:
            raise EnvironmentFault(f"problem {index} of {self.name}: {error}", code=error.code) from error
        return Problem(prompt, {"asked": asked}, opening=opening, messages=messages)

    def reward(self, problem: Problem, completion: str) -> float:
        return self.inner.reward(problem.data["asked"], whole_turn(completion, self.chat))


@dataclass(frozen=True, slots=True)
class ChatConversation(Chat):
    """A chat format around an environment of several turns: its replies are a user's messages."""

    conversation: Conversation

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """Return the inner reply as a user's message, in which marks of the format are broken."""
        said = self.conversation.reply(problem.data["asked"], [whole_turn(turn, self.chat) for turn in turns])
        return None if said is None else render_reply([{"role": "user", "content": said}], self.chat)

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        return self.conversation.reward_turns(problem.data["asked"], [whole_turn(turn, self.chat) for turn in turns])


def with_chat(environment: Environment, chat: ChatFormat | None) -> Environment:
    """Wrap `environment` with a chat format, if there is one."""
    if chat is None:
        return environment
    if isinstance(environment, Conversation):
        return ChatConversation(environment, chat, environment)
    return Chat(environment, chat)
