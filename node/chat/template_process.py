"""The process of `node.chat.template.FolderTemplate`: answer each line of JSON by another, and begin with one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from node.chat.template import MAX_RENDERED_CHARS, START_SECONDS, TemplateAnswer, TemplateQuery
from node.policy.inspection_process import allow_cpu_time, limit_resources
from node.policy.tokenizer_files import load_tokenizer

_MAX_REASON = 300


def render_query(tokenizer: Any, query: TemplateQuery) -> TemplateAnswer:
    """Render one conversation; what the template raises is a value here."""
    try:
        text = tokenizer.apply_chat_template(
            list(query.messages),
            tools=list(query.tools) or None,
            tokenize=False,
            add_generation_prompt=query.opening,
        )
    except Exception as error:  # noqa: BLE001  (a template is a program, and raises what it likes)
        return TemplateAnswer(fault=f"{type(error).__name__}: {str(error)[:_MAX_REASON]}")
    if len(text) > MAX_RENDERED_CHARS:
        return TemplateAnswer(fault=f"it writes {len(text)} characters, more than {MAX_RENDERED_CHARS}")
    return TemplateAnswer(text=text)


def main() -> None:
    """Answer queries about the folder that is named, each within the seconds of processor time that are given."""
    torch.set_num_threads(1)
    limit_resources(cpu_seconds=int(START_SECONDS))
    tokenizer, seconds = load_tokenizer(Path(sys.argv[1])), float(sys.argv[2])
    _answer(TemplateAnswer())
    for line in sys.stdin.buffer:
        allow_cpu_time(seconds)
        _answer(render_query(tokenizer, msgspec.json.decode(line, type=TemplateQuery)))


def _answer(answer: TemplateAnswer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
