"""Names to sort, and more of them in each turn: the environment is the user."""

import itertools
import random

import verifiers.v1 as vf

__all__ = ["SortingEnv", "SortingTaskset"]

NAMES = ("Ada", "Ann", "Bob", "Eve", "Ian", "Kim", "Lea", "Mia", "Tom", "Zoe")


class SortingData(vf.TaskData):
    lists: list[list[str]]


class SortingTask(vf.Task[SortingData]):
    @vf.reward
    async def sorted_each_time(self, trace: vf.Trace) -> float:
        known: list[str] = []
        right = 0
        for added, said in zip(self.data.lists, trace.assistant_messages, strict=False):
            known = sorted([*known, *added])
            right += (said.content or "").split() == known
        return right / len(self.data.lists)


class SortingConfig(vf.TasksetConfig):
    turns: int = 3


class SortingEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        first, *others = task.data.lists
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn("Sort: " + " ".join(first))
            for added in others:
                if segment.terminated:
                    return
                segment = await interaction.turn("Sort these too: " + " ".join(added))


class SortingTaskset(vf.Taskset[SortingTask, SortingConfig]):
    INFINITE = True

    def load(self):
        drawn = random.Random(7)
        for _ in itertools.count():
            names = drawn.sample(NAMES, 2 * self.config.turns)
            lists = [names[i : i + 2] for i in range(0, len(names), 2)]
            yield SortingTask(SortingData(prompt=None, system_prompt="Answer with names alone.", lists=lists))
