"""What mkdocs.yml adds to MkDocs, so that one text is right in the repository and on the site.

- A link such as `../benchmarks/baselines/load.json` leaves docs/. The site has no such folder, so the file is copied
  into it, and the link follows.
- A list may follow a paragraph without an empty line, as in CommonMark.
- The command line's page is made of the commands themselves, and the list of decisions of what is in docs/adr.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import click
from mkdocs.structure.files import File, Files

from node.cli import main

ROOT = Path(__file__).parent
COMMAND_LINE = "command-line.md"
OUTSIDE = re.compile(r"(?<=\]\()((?:\.\./)+)([^)#\s]+)(?=[)#])")
"""The target of a Markdown link that goes up: how far, and where to."""

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INTERRUPTED = re.compile(r"^(?![-*] |1\. |[ |#]|$)(.+)\n(?=[-*] |1\. )", re.MULTILINE)
"""A paragraph's last line with a list right below it."""

INTRODUCTION = """# The command line

What `swarmproof COMMAND --help` says. Each flag can also be given as a variable, such as `SWARMPROOF_WORKER_SLOTS=8`
for `swarmproof worker --slots 8`, or as a key of the file that `swarmproof --config FILE` reads: `slots = 8` in the
table `[worker]`. The flag wins, then the variable, then the file. Exit code 2 is a wrong command line, and 1 everything
else, where a command does not say otherwise.

`swarmproof --verbose` logs every detail, and `swarmproof --debug` shows tracebacks; both stand before the command.

"""


def on_config(config: Any) -> Any:
    """Add each decision to the section that begins with their list."""
    decisions = sorted(f"adr/{path.name}" for path in (ROOT / "docs" / "adr").glob("[0-9]*.md"))
    for section in config.nav:
        for pages in section.values():
            if pages == ["adr/README.md"]:
                pages.extend(decisions)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated page, and each file that a page names outside of docs/."""
    files.append(File.generated(config, COMMAND_LINE, content=command_line_page()))
    for page in list(files.documentation_pages()):
        folder = PurePosixPath(page.src_uri).parent
        for target in filter(None, (_target(folder, found) for found in OUTSIDE.finditer(page.content_string))):
            if files.get_file_from_path(_copied(target)) is None:
                files.append(File.generated(config, _copied(target), abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of docs/ to the copies, and set lists apart from the paragraphs above them."""
    folder = PurePosixPath(page.file.src_uri).parent

    def moved(found: re.Match[str]) -> str:
        target = _target(folder, found)
        return found[0] if target is None else "../" * len(folder.parts) + _copied(target)

    blocks = FENCED.findall(markdown)
    texts = [INTERRUPTED.sub(r"\1\n\n", OUTSIDE.sub(moved, text)) for text in FENCED.split(markdown)]
    return "".join(text + block for text, block in zip(texts, [*blocks, ""], strict=True))


def _target(folder: PurePosixPath, found: re.Match[str]) -> str | None:
    """A file of the repository, relative to its root; None for a link that stays in docs/, or goes nowhere."""
    is_out = found[1].count("../") == len(folder.parts) + 1 and (ROOT / found[2]).is_file()
    # Pages have links of their own, which would not be right in another place.
    return found[2] if is_out and not found[2].endswith(".md") else None


def _copied(target: str) -> str:
    return f"repository/{target}"


def command_line_page() -> str:
    """Every command with its usage, its text and its flags, as Markdown."""
    root = click.Context(main, info_name="swarmproof")
    sections = [_section(one, root) for one in _commands(main, root)]
    return INTRODUCTION + "\n".join(sections)


def _commands(group: click.Group, ctx: click.Context) -> Iterator[click.Command]:
    found = (group.get_command(ctx, name) for name in group.list_commands(ctx))
    yield from (command for command in found if command is not None and not command.hidden)


def _section(command: click.Command, parent: click.Context, level: int = 2) -> str:
    ctx = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    said = [f"{'#' * level} {ctx.command_path.removeprefix('swarmproof ')}", f"    {usage}", _text(command.help or "")]
    if flags := list(_flags(command, ctx)):
        said.append("\n".join(["| flag | |", "|---|---|", *flags]))
    if isinstance(command, click.Group):
        said += [_section(one, ctx, level + 1) for one in _commands(command, ctx)]
    return "\n\n".join(part for part in said if part) + "\n"


def _text(help_text: str) -> str:
    return "\n\n".join(map(_paragraph, inspect.cleandoc(help_text).split("\n\n")))


def _paragraph(text: str) -> str:
    """One of click's: behind a `\\b` lines stay as they are, below a first one that announces them."""
    if not text.startswith("\b\n"):
        return _escaped(text)
    first, *lines = text.removeprefix("\b\n").splitlines()
    above = [_escaped(first), ""] if first.endswith(":") else [f"    {first}"]
    return "\n".join([*above, *(f"    {line.removeprefix('  ')}" for line in lines)])


def _flags(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for option in command.params:
        record = option.get_help_record(ctx)
        if isinstance(option, click.Option) and record is not None:
            flag, said = record
            yield f"| `{flag}` | {_escaped(said)} |".replace("\n", " ")


def _escaped(text: str) -> str:
    """Without what Markdown or a table would take for its own; what stands between backticks stays code."""
    return re.sub(r"(`[^`]*`)|([\\*_<>|\[\]])", lambda found: found[1] or f"\\{found[2]}", text)
