"""A folder's chat template in a process of its own: what a stranger's program there can take."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from fine_tuning import CHAT, chat_folder, conversations, job_in, run_job, write_rows
from locations import ROOT
from waiting import until

from coordinator.errors import UnfitModel
from coordinator.sft import run
from node.chat.template import MAX_RENDERED_CHARS, FolderTemplate
from node.policy.errors import MalformedPolicy

SOON = 120.0
QUESTION = [{"role": "user", "content": "1+1"}]
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    chat_folder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", conversations())
    return tmp_path


def write(folder: Path, template: str) -> Path:
    (folder / "model" / "chat_template.jinja").write_text(template)
    return folder / "model"


def test_one_process_answers_for_all_conversations(folder: Path) -> None:
    failing = CHAT + "{% if messages[0].content == 'no' %}{{ raise_exception('not this one') }}{% endif %}"
    with FolderTemplate(write(folder, failing)) as template:
        text = template(QUESTION, (), opening=True).text
        assert "1+1" in text
        assert "not this one" in template([{"role": "user", "content": "no"}], (), opening=True).fault
        assert template(QUESTION, (), opening=True).text == text
        assert text.startswith(template(QUESTION, (), opening=False).text)
    with pytest.raises(MalformedPolicy, match="ended its process"):
        template(QUESTION, (), opening=True)


def test_a_template_that_writes_without_end_is_a_fault_of_its_row(folder: Path) -> None:
    with FolderTemplate(write(folder, f"{{{{ 'x' * {MAX_RENDERED_CHARS + 1} }}}}")) as template:
        assert f"more than {MAX_RENDERED_CHARS}" in template(QUESTION, (), opening=True).fault
    with FolderTemplate(write(folder, "{{ 'x' * (2 ** 36) }}")) as template:
        assert "MemoryError" in template(QUESTION, (), opening=True).fault


def test_a_template_that_never_ends_ends_fine_tuning_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rendered in the trainer's own process, where nothing could stop it, for each row again."""
    write(folder, FOREVER)
    monkeypatch.setattr(run, "FolderTemplate", partial(FolderTemplate, seconds=0.5))
    with pytest.raises(UnfitModel, match="its chat template took longer than"):
        run_job(job_in(folder))


@pytest.mark.system
def test_a_template_that_never_ends_is_no_orphan_for_long_after_its_trainer_is_killed(folder: Path) -> None:
    """It would take a core of the operator's machine until somebody looks for it."""
    code = (
        "import sys; from pathlib import Path; from node.chat.template import FolderTemplate; "
        "template = FolderTemplate(Path(sys.argv[1]), seconds=1.0); print(template._child.pid, flush=True); "
        "template._line = lambda seconds: sys.stdin.read(); "
        "template([{'role': 'user', 'content': '1+1'}], (), opening=True)"
    )
    command = [sys.executable, "-c", code, str(write(folder, FOREVER))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as trainer:  # type: ignore[call-overload]
        child = psutil.Process(int(trainer.stdout.readline()))
        before = child.cpu_times().user
        until(lambda: child.cpu_times().user > before, seconds=SOON)
        trainer.kill()
    until(lambda: has_ended(child), seconds=SOON)


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
