"""The first start of a run whose chat format is its model's own template: reduced once, kept, or refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from model_folders import make_folder

from coordinator.commands.preflight import preflight_checks
from coordinator.errors import BadConfiguration, UnfitModel
from coordinator.run.chat import resolve_chat
from coordinator.run.definition import read_run_file
from coordinator.run.home import create_home, find_home
from node.doctor.report import Level
from node.protocol.chat import ChatFormat
from node.sandbox.root import PYTHON_VERSION

PUBLIC_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
RUN = """name = "chat"
[model]
initial = "{folder}"
[[environments]]
name = "arithmetic"
[sampling]
chat = "{chat}"
"""


checked = partial(preflight_checks, database_url=None, blobs_url=None, model_elsewhere=True, uncalibrated=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_folder(tmp_path / "model")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def run_file(tmp_path: Path, *, folder: object, chat: str = "model") -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=folder, chat=chat))
    return path


def test_the_template_becomes_data_once_and_a_later_start_needs_no_folder(tmp_path: Path, folder: Path) -> None:
    """Read anew, a template that was changed meanwhile would change the rules of a run that goes on."""
    _, spec = read_run_file(run_file(tmp_path, folder=folder))
    home = create_home(tmp_path / "data", public_key=PUBLIC_KEY, spec=spec, before_first=resolve_chat)
    chat = home.spec.sampling.chat
    home.database.close()
    assert isinstance(chat, ChatFormat)
    assert chat.user == ("<user>", "content", "</user>")
    assert chat.generation == "<assistant>"
    (folder / "chat_template.jinja").write_text("{{ raise_exception('gone') }}")
    again = create_home(tmp_path / "data", public_key=PUBLIC_KEY, spec=spec, before_first=resolve_chat)
    again.database.close()
    assert again.spec == home.spec
    found = find_home(tmp_path / "data", None)
    assert found is not None
    found.database.close()
    assert found.spec == home.spec
    other = msgspec.structs.replace(spec, name="another")
    with pytest.raises(BadConfiguration, match=r"run\.toml differs"):
        create_home(tmp_path / "data", public_key=PUBLIC_KEY, spec=other, before_first=resolve_chat)


def test_the_check_before_a_start_says_what_was_found(tmp_path: Path, folder: Path) -> None:
    def found(chat: str) -> tuple[Level, str]:
        path = run_file(tmp_path, folder=folder, chat=chat)
        key, data = tmp_path / "none.key", tmp_path / "data"
        checks = preflight_checks(
            path, key, data, database_url=None, blobs_url=None, model_elsewhere=True, uncalibrated=True
        )
        (check,) = [check for check in checks if check.name == "chat"]
        return check.level, check.sentence

    level, sentence = found("model")
    assert level is Level.OK
    assert "system messages" in sentence
    assert "no place for tools, calls, tools' results" in sentence
    level, sentence = found("model/no-think")
    assert level is Level.PROBLEM
    assert "no thinking mode to turn off" in sentence
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper }}"))
    level, sentence = found("model")
    assert level is Level.PROBLEM
    assert "cannot be reduced to data" in sentence


def test_a_template_without_tools_begins_no_run_whose_policy_is_to_call_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody could load the environments of a run whose rules are signed."""
    path = run_file(tmp_path, folder=folder)
    path.write_text(
        path.read_text().replace("[sampling]", f"tool = {{ python = {PYTHON_VERSION!r} }}\n[sampling]\nmax_turns = 2")
    )
    _, spec = read_run_file(path)
    with pytest.raises(UnfitModel, match=r"no place for environments\.tool"):
        resolve_chat(spec)
    monkeypatch.setenv("PATH", "")
    checks = preflight_checks(
        path,
        tmp_path / "none.key",
        tmp_path / "data",
        database_url=None,
        blobs_url=None,
        model_elsewhere=True,
        uncalibrated=True,
    )
    (check,) = [check for check in checks if check.name == "sandbox"]
    assert check.level is Level.WARNING
    assert "apt install bubblewrap" in check.sentence


@pytest.mark.parametrize(
    ("initial", "reason"), [("tiny", "needs a model's folder"), ("/nowhere/at/all", "no folder here")]
)
def test_a_run_without_its_models_folder_does_not_begin(tmp_path: Path, initial: str, reason: str) -> None:
    _, spec = read_run_file(run_file(tmp_path, folder=initial))
    with pytest.raises(UnfitModel, match=reason):
        resolve_chat(spec)


def test_a_template_that_takes_all_memory_ends_its_own_process_only(tmp_path: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ 'x' * 10**11 }}")
    _, spec = read_run_file(run_file(tmp_path, folder=folder))
    with pytest.raises(UnfitModel, match=r"cannot be reduced|ended with"):
        resolve_chat(spec)
