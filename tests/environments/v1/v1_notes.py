"""With a tool that all tasks share, and a state of each rollout that it writes."""

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["NotesTaskset"]


class NotesState(vf.State):
    notes: list[str] = Field(default_factory=list)


class Notes(vf.Toolset[vf.SharedToolsetConfig, NotesState]):
    TOOL_PREFIX = None

    @vf.tool
    async def note(self, text: str) -> str:
        """Write something down."""
        self.state.notes.append(text)
        return f"{len(self.state.notes)} notes"


class NotesTask(vf.Task[vf.TaskData, NotesState]):
    @vf.stop
    async def full(self, trace: vf.Trace) -> bool:
        return len(trace.state.notes) >= 3

    @vf.reward(weight=0.5)
    async def noted(self, trace: vf.Trace) -> float:
        return float(trace.state.notes == ["a", "b"])

    @vf.reward(weight=0.5)
    async def said(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "done")


class NotesConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class NotesTaskset(vf.Taskset[NotesTask, NotesConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Notes(config.tools)]

    def load(self):
        return [NotesTask(vf.TaskData(prompt="Note a, then b, then say done."))]
