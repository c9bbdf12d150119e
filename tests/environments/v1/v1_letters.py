"""Of one turn: the share of lower-case letters in what was written."""

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


class LettersTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def lower(self, trace: vf.Trace) -> float:
        text = trace.messages[-1].content or ""
        return sum(letter.islower() for letter in text) / max(len(text), 1)


class LettersConfig(vf.TasksetConfig):
    count: int = 8


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self):
        return [LettersTask(vf.TaskData(prompt=f"Letters, please: {i}")) for i in range(self.config.count)]
