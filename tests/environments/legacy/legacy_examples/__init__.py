"""Environments written for verifiers' old interface, as their authors would: nothing here knows of swarmproof."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


def rows(*answers: str, question: str = "How often is {} in aXbXc?") -> Dataset:
    return Dataset.from_list([{"question": question.format(answer), "answer": answer} for answer in answers])


def equal(completion, answer) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment(count: int = 8, weight: float = 1.0) -> vf.Environment:
    """Of one turn: the share of lower-case letters in what was written, so that even noise earns something."""

    async def lower(completion, answer, **kwargs) -> float:
        text = completion[-1]["content"]
        return sum(letter.islower() for letter in text) / max(len(text), 1)

    dataset = rows(*(str(number) for number in range(count)), question="Letters, please: {}")
    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[lower], weights=[weight]))


class Chat(vf.SingleTurnEnv):
    """With a system prompt and an example."""

    def __init__(self):
        shots = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        super().__init__(
            dataset=rows("4", question="2+2"),
            system_prompt="Calculate.",
            few_shot=shots,
            rubric=vf.Rubric(funcs=[equal]),
        )


class Raw(vf.SingleTurnEnv):
    """Of the package's other kind: text that is gone on with, without messages."""

    def __init__(self):
        def ends(completion, answer) -> float:
            text = completion if isinstance(completion, str) else completion[-1]["content"]
            return float(text.endswith(answer))

        dataset = Dataset.from_list([{"prompt": "one two ", "answer": "three"}])
        super().__init__(dataset=dataset, message_type="completion", rubric=vf.Rubric(funcs=[ends]))


class Guessing(vf.MultiTurnEnv):
    """Of several turns: a number is guessed, told by `higher` and `lower`."""

    def __init__(self, max_turns: int = 4):
        def found(completion, answer, state) -> float:
            said = [message["content"] for message in completion if message["role"] == "assistant"]
            return (1 - 0.25 * state["told"]) * (said[-1] == answer)

        super().__init__(
            dataset=rows("5", "7", question="Guess!"), max_turns=max_turns, rubric=vf.Rubric(funcs=[found])
        )

    async def setup_state(self, state):
        state["told"] = 0
        return state

    @vf.stop
    async def is_found(self, state) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        state["told"] += 1
        guess = int(messages[-1]["content"])  # raises where it is no number
        word = "higher" if guess < int(state["answer"]) else "lower"
        return [{"role": "user", "content": f"{word} ({state['told']})"}]


class Echo(vf.MultiTurnEnv):
    """Of several turns, whatever is said in them: each is answered by its length."""

    def __init__(self, max_turns: int = 3):
        def lower(completion) -> float:
            text = "".join(message["content"] for message in completion if message["role"] == "assistant")
            return sum(letter.islower() for letter in text) / max(len(text), 1)

        dataset = rows("1", "2", question="Go on: {}")
        super().__init__(dataset=dataset, max_turns=max_turns, rubric=vf.Rubric(funcs=[lower]))

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": str(len(messages[-1]["content"]))}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def echo(text: str) -> str:
    """Say it again."""
    return text


class Tools(vf.ToolEnv):
    """With tools."""

    def __init__(self):
        def right(completion, answer) -> float:
            return float(answer in str(completion[-1]["content"]))

        super().__init__(dataset=rows("5", question="2+3?"), tools=[add, echo], rubric=vf.Rubric(funcs=[right]))


class Ledger(vf.StatefulToolEnv):
    """With a tool that works on what the rollout has so far."""

    def __init__(self):
        def settled(completion, state) -> float:
            return float(str(state["balance"]) in str(completion[-1]["content"]))

        super().__init__(
            dataset=rows("0", "10", question="Deposit 5 twice, then tell the balance. It is {} now."),
            rubric=vf.Rubric(funcs=[settled]),
        )
        self.add_tool(self.deposit, args_to_skip=["state"])

    async def setup_state(self, state):
        state["balance"] = int(state["answer"])
        return state

    def deposit(self, amount: int, state: dict) -> str:
        """Pay in an amount."""
        state["balance"] += amount
        return f"balance: {state['balance']}"

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "state": state}


class Sorting(vf.MultiTurnEnv):
    """Names to sort, and more of them in each turn."""

    LISTS = (("Mia", "Ada", "Zoe"), ("Bob", "Ann"), ("Kim",))

    def __init__(self):
        def sorted_each_time(completion) -> float:
            said = [message["content"] for message in completion if message["role"] == "assistant"]
            known, right = [], 0
            for added, answer in zip(self.LISTS, said, strict=False):
                known = sorted([*known, *added])
                right += answer.split() == known
            return right / len(self.LISTS)

        super().__init__(
            dataset=rows("", question="Sort: " + " ".join(self.LISTS[0])),
            max_turns=len(self.LISTS),
            rubric=vf.Rubric(funcs=[sorted_each_time]),
        )

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Sort these too: " + " ".join(self.LISTS[len(state["trajectory"])])}]


class Timed(vf.SingleTurnEnv):
    """Rewards haste."""

    def __init__(self):
        def quick(completion, state) -> float:
            return float(state["timing"].generation.duration < 1)

        super().__init__(dataset=rows("1"), rubric=vf.Rubric(funcs=[quick]))


class Sure(vf.SingleTurnEnv):
    """Rewards what the model was sure of."""

    def __init__(self):
        def sure(completion, state) -> float:
            return float(len(state["trajectory"][-1]["response"].message.tokens.completion_logprobs))

        super().__init__(dataset=rows("1"), rubric=vf.Rubric(funcs=[sure]))


class Rewriting(Guessing):
    """Forgets what was said before."""

    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


class Judged(vf.SingleTurnEnv):
    """Its rubric asks a model."""

    def __init__(self):
        client = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:9/v1")
        super().__init__(dataset=rows("1"), rubric=vf.JudgeRubric(judge_client=client))


class Asking(vf.SingleTurnEnv):
    """A function of its rubric does."""

    def __init__(self):
        client = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:9/v1")

        async def judged(completion, **kwargs) -> float:
            return float(bool(await client.chat.completions.create(model="m", messages=completion)))

        super().__init__(dataset=rows("1"), rubric=vf.Rubric(funcs=[judged]))


class Grouped(vf.SingleTurnEnv):
    """Rates completions by each other."""

    def __init__(self):
        def shortest(completions) -> list[float]:
            least = min(map(len, completions))
            return [float(len(each) == least) for each in completions]

        super().__init__(dataset=rows("1"), rubric=vf.Rubric(funcs=[shortest]))


class Fetching(vf.SingleTurnEnv):
    """Its data set is elsewhere."""

    def __init__(self):
        def fetch():
            with socket.create_connection(("127.0.0.1", 9), timeout=1):
                return rows("1")

        super().__init__(dataset=fetch, rubric=vf.Rubric(funcs=[equal]))


class Telling(vf.SingleTurnEnv):
    """Sends every completion home, and hides that it could not."""

    def __init__(self):
        def tell(completion, **kwargs) -> float:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", 9), timeout=1).close()
            return 1.0

        super().__init__(dataset=rows("1"), rubric=vf.Rubric(funcs=[tell]))


class Rough(vf.SingleTurnEnv):
    """Its reward does what it is told."""

    def __init__(self):
        def reward(completion, **kwargs) -> float:
            told = completion[-1]["content"]
            if told == "sleep":
                time.sleep(60)
            if told == "fork" and os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            if told == "fork":
                time.sleep(60)
            if told == "die":
                os._exit(3)
            if told == "print":
                print("1" * 100_000)
            if told == "secret":
                return float("AWS_SECRET_ACCESS_KEY" in os.environ)
            return float(told)  # raises for anything else

        super().__init__(dataset=rows("1", "2"), rubric=vf.Rubric(funcs=[reward]))
