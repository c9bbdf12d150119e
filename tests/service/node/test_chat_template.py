"""A folder's chat template in a process of its own: what a stranger's program there can take."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from fine_tuning import CHAT, chat_folder, conversations, job_in, run_job, write_rows

from coordinator.errors import UnfitModel
from coordinator.sft import run
from node.chat.template import MAX_RENDERED_CHARS, FolderTemplate
from node.policy.errors import MalformedPolicy

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
