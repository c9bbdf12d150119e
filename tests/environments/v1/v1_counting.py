"""Sums without end, with settings of the tasks."""

import itertools

import verifiers.v1 as vf

__all__ = ["CountingTaskset"]


class CountingData(vf.TaskData):
    answer: int


class CountingTaskConfig(vf.TaskConfig):
    tolerance: int = 0


class CountingTask(vf.Task[CountingData, vf.State, CountingTaskConfig]):
    @vf.stop
    async def once(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward
    async def near(self, trace: vf.Trace) -> float:
        return float(abs(int(trace.last_reply) - self.data.answer) <= self.config.tolerance)


class CountingConfig(vf.TasksetConfig):
    task: CountingTaskConfig = CountingTaskConfig()


class CountingTaskset(vf.Taskset[CountingTask, CountingConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield CountingTask(CountingData(prompt=f"{i} + {i}?", answer=2 * i), self.config.task)
