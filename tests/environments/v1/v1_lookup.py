"""With a tool of each task."""

import verifiers.v1 as vf

__all__ = ["LookupTaskset"]

FACTS = {"ada": "wrote the first program", "alan": "described the machine"}


class Facts(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "facts"

    async def setup_task(self, task) -> None:
        self.known = {task.name: FACTS[task.name]}

    @vf.tool
    def lookup(self, name: str, times: int = 1) -> str:
        """Look up what a person is known for."""
        return ", ".join([self.known[name]] * times)


class LookupTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class LookupTask(vf.Task[vf.TaskData, vf.State, LookupTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Facts(config.tools)]

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))

    @vf.reward
    async def told(self, trace: vf.Trace) -> float:
        return float(FACTS[self.data.name] in trace.last_reply and trace.metrics["calls"] > 0)


class LookupConfig(vf.TasksetConfig):
    task: LookupTaskConfig = LookupTaskConfig()


class LookupTaskset(vf.Taskset[LookupTask, LookupConfig]):
    def load(self):
        for name in FACTS:
            data = vf.TaskData(name=name, prompt=f"What is {name} known for?", system_prompt="Look it up.")
            yield LookupTask(data, self.config.task)
