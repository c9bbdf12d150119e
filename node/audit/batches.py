"""Check what training steps use: each admitted group in its turn (docs/protocol.md, section 8.1, rules 4 and 12).

An operator that could leave out groups that it admitted would choose what is trained on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from node.protocol.messages import BatchEntry
from node.protocol.run import BatchSpec

Submission = bytes
"""A submission's id: half as large as its hexadecimal digits."""

_NOT_ADMITTED: Final = -1
_SET_ASIDE: Final = -2
_WAITING: Final = -3
_LEFT_OUT: Final = -4


class LoggedGroup(NamedTuple):
    """An admitted group that a step may use, without what takes memory."""

    version: int
    slot: int
    node: str
    has_signal: bool


class BatchChecker:
    """Follows submissions from their verdict to the step that uses them; some 150 bytes for each."""

    def __init__(self, rules: BatchSpec) -> None:
        self.step = -1
        self._rules = rules
        self._fates: dict[Submission, int] = {}  # the step that used it, or why none has
        self._waiting: dict[Submission, LoggedGroup] = {}
        self._waiting_of: dict[int, set[Submission]] = defaultdict(set)

    def judge(self, name: Submission) -> bool:
        """Record that a submission has a verdict; return whether it is the first."""
        if name in self._fates:
            return False
        self._fates[name] = _NOT_ADMITTED
        return True

    def step_of(self, name: Submission) -> int | None:
        """Return the step that used a group, None for none."""
        fate = self._fates.get(name, _NOT_ADMITTED)
        return fate if fate >= 0 else None

    def is_waiting(self, name: Submission) -> bool:
        """Return whether a group waits for a step that uses it."""
        return name in self._waiting

    def admit(self, name: Submission, group: LoggedGroup) -> None:
        """Record an admitted group, which steps use in its turn unless the rules leave it out."""
        if self._rules.only_signal and not group.has_signal:
            self._fates[name] = _SET_ASIDE
            return
        self._fates[name] = _WAITING
        self._waiting[name] = group
        self._waiting_of[group.version].add(name)

    def revoke(self, name: Submission) -> bool:
        """Record that a second verdict took back a group that no step has used; return whether it waited for one."""
        self._fates[name] = _NOT_ADMITTED
        return self._drop(name) is not None

    def take(self, entry: BatchEntry) -> tuple[list[tuple[str, str]], list[LoggedGroup]]:
        """Return (code, detail) of everything that is wrong with a batch's groups, and those that it uses."""
        due = self._due(entry.step)
        problems, used = list(self._out_of_order(entry.step)), list[LoggedGroup]()
        names = [bytes.fromhex(name) for name in entry.submissions]
        wrong = [problem for name in names if (problem := self._use(name, entry.step, used)) is not None]
        problems += wrong
        if not problems:  # which would explain it
            problems += self._selection(entry.step, due, names)
        self.step = max(self.step, entry.step)
        self._forget_left_out()
        return problems, used

    def _forget_left_out(self) -> None:
        """Let groups whose last chance is over wait no longer, or each later step would be blamed for them."""
        for version in [version for version in self._waiting_of if version <= self.step - self._rules.max_async]:
            for name in self._waiting_of.pop(version):
                del self._waiting[name]
                self._fates[name] = _LEFT_OUT

    def _out_of_order(self, step: int) -> Iterator[tuple[str, str]]:
        if step <= self.step:
            yield "batch_order", f"Step {step} after step {self.step}."
        elif step > self.step + 1:
            yield "unlogged_step", f"Step {step} comes where step {self.step + 1} should."

    def _due(self, step: int) -> list[Submission]:
        """Return the groups that a step has to use, in order: the oldest, and all whose last chance it is."""
        due: list[Submission] = []
        for version in sorted(self._waiting_of):
            room = self._rules.groups_per_step - len(due)
            if version > step - self._rules.max_async:
                if room <= 0:
                    break
            else:
                room = len(self._waiting_of[version])
            due += sorted(self._waiting_of[version], key=lambda name: self._waiting[name].slot)[:room]
        return due

    def _use(self, name: Submission, step: int, used: list[LoggedGroup]) -> tuple[str, str] | None:
        """Add a group to `used`; return (code, detail) of what is wrong with that, None if nothing is."""
        fate = self._fates.get(name)
        short = f"{name.hex()[:16]}…"
        if fate is None or fate == _NOT_ADMITTED:
            return "batch_not_admitted", f"Submission {short} was not admitted before."
        if fate == _SET_ASIDE:
            return "batch_without_signal", f"Submission {short} has equal rewards."
        if fate == _LEFT_OUT:
            return "batch_stale", f"Step {step} uses submission {short}, whose last chance was before."
        group = self._drop(name)
        if group is None:
            return "batch_reuse", f"Submission {short} is used twice."
        self._fates[name] = step
        used.append(group)
        if not step - self._rules.max_async <= group.version <= step:
            return "batch_stale", f"Step {step} uses work of policy {group.version}."
        return None

    def _drop(self, name: Submission) -> LoggedGroup | None:
        group = self._waiting.pop(name, None)
        if group is not None:
            of_version = self._waiting_of[group.version]
            of_version.discard(name)
            if not of_version:
                del self._waiting_of[group.version]
        return group

    def _selection(
        self, step: int, due: Sequence[Submission], names: Sequence[Submission]
    ) -> Iterator[tuple[str, str]]:
        """Yield how a batch of groups that may be used differs from those whose turn it is."""
        if len(due) < self._rules.groups_per_step:
            yield (
                "batch_incomplete",
                f"Step {step} came when {len(due)} groups of {self._rules.groups_per_step} were there.",
            )
        if names == due:
            return
        left_out = set(due).difference(names)
        early = set(names).difference(due)
        if not left_out and not early:
            yield "batch_selection", f"Step {step} names its groups in another order than that of their slots."
            return
        some = next((name for name in due if name in left_out), None) or next(name for name in names if name in early)
        what = f"{len(left_out)} groups whose turn it was were left out, {len(early)} taken before theirs"
        yield "batch_selection", f"Step {step}: {what}, such as submission {some.hex()[:16]}…."
