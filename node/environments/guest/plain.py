"""A class behind an entry point of the group `swarmproof.environments`, whose arguments are keywords.

problem(index) -> an object or a mapping with `prompt`, and perhaps `messages`
reward(problem, completion) -> float
reply(problem, turns) -> str | None         where there are several turns,
reward_turns(problem, turns) -> float       and with it
"""

from __future__ import annotations

from importlib import metadata

from .adapter import Json, RecentValues, Turn, Unusable, field_of, plain_message, versions, within_bounds

GROUP = "swarmproof.environments"


class PlainClass:
    """One environment; its problems are kept as it made them."""

    def __init__(self, load: Json) -> None:
        entry = _entry(load["target"])
        try:
            made = entry.load()
        except Exception as error:
            raise Unusable("environment_failed", f"it cannot be imported: {error!r}") from error
        missing = [method for method in ("problem", "reward") if not callable(getattr(made, method, None))]
        if missing:
            raise Unusable("refused_environment", f"it has no method {missing[0]}")
        try:
            self._environment = made(**load["arguments"])
        except Exception as error:
            raise Unusable("bad_arguments", f"it does not accept its arguments: {error!r}") from error
        self._several = callable(getattr(self._environment, "reply", None))
        if self._several and not callable(getattr(self._environment, "reward_turns", None)):
            raise Unusable("refused_environment", "it has a method reply, and no method reward_turns")
        self._problems = RecentValues(self._environment.problem)
        self._package = entry.dist.name if entry.dist is not None else None

    def loaded(self) -> Json:
        return {
            "problems": None,
            "several_turns": self._several,
            "speaks": "text",
            "versions": versions(None, self._package),
        }

    def problem(self, index: int) -> Json:
        problem = self._problems[index]
        messages = [plain_message(message) for message in field_of(problem, "messages") or ()]
        return {"prompt": field_of(problem, "prompt") or "", "messages": messages}

    def reply(self, index: int, turns: list[Turn]) -> Json:
        said = self._environment.reply(self._problems[index], turns)
        return {} if said is None else {"text": str(said)}

    def reward(self, index: int, turns: list[Turn]) -> float:
        problem = self._problems[index]
        if len(turns) == 1:
            return within_bounds(self._environment.reward(problem, turns[0]))
        return within_bounds(self._environment.reward_turns(problem, turns))


def _entry(target: str) -> metadata.EntryPoint:
    entries = list(metadata.entry_points(group=GROUP, name=target))
    if not entries:
        there = ", ".join(sorted(metadata.entry_points(group=GROUP).names)) or "none"
        raise Unusable("environment_missing", f"no entry point {target!r} of {GROUP} is installed; there are: {there}")
    if len(entries) > 1:
        raise Unusable("refused_environment", f"{len(entries)} packages have an entry point {target!r} of {GROUP}")
    return entries[0]
