"""`swarmproof env`: the environments of other packages, each in its own virtual environment."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.commands.options import EXISTING_FILE, EXISTING_FOLDER, json_option, number_option
from node.environments.base import EnvironmentFault
from node.errors import ConfigError
from shardcast.files import write_atomically

if TYPE_CHECKING:
    from node.environments.isolated.store import InstalledEnvironment

_OTHERS_SHOWN = 8


@click.group()
def env() -> None:
    """Install and check environments of other packages.

    Each has its own virtual environment, and runs in a sandbox without a network. A run names them; nothing is
    installed but by these commands, or by a worker with --allow-environments.
    """


@env.command()
@click.argument("package", metavar="PACKAGE[==VERSION] | PATH", required=False)
@click.option("--lock", type=EXISTING_FILE, metavar="FILE", help="Install exactly what this lock of a run says.")
@click.option(
    "--with", "extra", multiple=True, metavar="PACKAGE[==VERSION]", help="Install this beside it; repeatable."
)
@click.option("--find-links", type=EXISTING_FOLDER, metavar="FOLDER", help="A folder of wheels to look in as well.")
@click.option("--python", type=EXISTING_FILE, metavar="FILE", help="The interpreter to use.  [default: this one]")
@click.option("--build", is_flag=True, help="Also take source distributions; building one runs its code, as you.")
@click.option(
    "--run",
    "run_file",
    type=EXISTING_FILE,
    metavar="FILE",
    help="A run.toml to name it in: where it names this package already, else at its end.",
)
@json_option("One JSON object instead of text.")
def install(
    package: str | None,
    *,
    lock: Path | None,
    extra: tuple[str, ...],
    find_links: Path | None,
    python: Path | None,
    build: bool,
    run_file: Path | None,
    as_json: bool,
) -> None:
    """Install an environment, and say how run.toml names it.

    \b
    Examples:
      swarmproof env install wordle==0.1.4
      swarmproof env install ./largest --run run.toml
      swarmproof env install --lock ~/.swarmproof/5f3c.../worker/datasets/9d1e....dataset

    Read its code first. Wheels alone are taken, which run nothing while they are installed; a folder is built.
    """
    from node.environments.isolated.install import install_lock, install_package
    from node.environments.isolated.lock import read_lock
    from node.environments.isolated.store import EnvironmentStore

    if (package is None) == (lock is None):
        raise click.UsageError("Name a package, or a run's --lock.")
    store = EnvironmentStore.default()
    how: dict[str, Any] = {"find_links": find_links, "python": python, "build": build}
    if lock is not None:
        if extra:
            raise click.UsageError("--with is for a package: a lock says all that is installed.")
        installed = install_lock(store, read_lock(lock.read_bytes()), **how)
    else:
        installed = install_package(
            store, package or "", extra=extra, find_links=find_links, python=python, build=build
        )
    if as_json:
        click.echo(json.dumps(_row(installed)))
        return
    what = f"{installed.lock.name} {installed.lock.version}"
    if run_file is None:
        click.echo(f"{what} is installed. A run.toml names it so:\n\n{toml_of(installed)}")
        return
    text = run_file.read_text(encoding="utf-8")
    write_atomically(run_file, _named_in(text, installed).encode())
    click.echo(f"{what} is installed, and {run_file} names it.")


@env.command()
@click.argument("name", metavar="NAME")
def new(name: str) -> None:
    """Write a package with an environment and its tests into the folder NAME, to start from.

    \b
    Example:
      swarmproof env new largest
      swarmproof env install ./largest --run run.toml
    """
    from node.commands.environment_template import new_package

    files, folder = new_package(name), Path(name)
    if folder.exists():
        raise ConfigError(f"{folder} exists already.")
    folder.mkdir()
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
    click.echo(f"{', '.join(str(folder / path) for path in files)}")
    click.echo(f"Try it with `python -m pytest {name}`, then `swarmproof env install ./{name}`.")


@env.command("list")
@json_option("A JSON list instead of a table.")
def list_(*, as_json: bool) -> None:
    """List what is installed here.

    \b
    Example:
      swarmproof env list
    """
    from node.environments.isolated.store import EnvironmentStore

    rows = [_row(one) for one in EnvironmentStore.default().installed()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo("No environment is installed. `swarmproof env install PACKAGE` installs one.")
        return
    width = max(7, *(len(row["package"]) for row in rows))
    click.echo(f"{'PACKAGE':<{width}}  {'VERSION':<12}  PYTHON  LOCK          OFFERS")
    for row in rows:
        offers = ", ".join(row["offers"][:_OTHERS_SHOWN]) + (", …" if len(row["offers"]) > _OTHERS_SHOWN else "")
        lock = row["lock"]["digest"][:12]
        click.echo(f"{row['package']:<{width}}  {row['version']:<12}  {row['python']:<6}  {lock}  {offers}")


@env.command()
@click.argument("name", metavar="NAME")
def remove(name: str) -> None:
    """Delete an installed environment: NAME, NAME==VERSION, or the beginning of its lock's digest.

    \b
    Example:
      swarmproof env remove largest==1.0
    """
    from node.environments.isolated.store import EnvironmentStore

    store = EnvironmentStore.default()
    installed = store.select(name)
    store.remove(installed)
    click.echo(f"{installed.lock.name} {installed.lock.version} ({installed.folder.name[:12]}) is removed.")


@env.command()
@click.argument("name", metavar="NAME")
@click.option("--environment", metavar="NAME", help="As run.toml names it.  [default: the only one that it offers]")
@click.option("--argument", "given", multiple=True, metavar="KEY=VALUE", help="One of its arguments; repeatable.")
@number_option("--problems", "How many.", most=10_000, default=20)
@json_option("One JSON object instead of text.")
def check(name: str, *, environment: str | None, given: tuple[str, ...], problems: int, as_json: bool) -> None:
    """Try whether an installed environment is the same everywhere.

    \b
    Example:
      swarmproof env check wordle --argument difficulty=3

    Asks it for the same problems, replies and rewards in processes with other hash seeds, locales, time zones and
    numbers of threads, and compares; looks whether rewards are finite and replies bounded, and whether its files are
    those that were installed. Ends with 1 where something has to be changed.
    """
    from node.environments.isolated.check import check as compare
    from node.environments.isolated.lock import changed_files
    from node.environments.isolated.sandbox import guest_command
    from node.environments.isolated.store import EnvironmentStore
    from node.protocol.environment_spec import EnvironmentSpec

    store = EnvironmentStore.default()
    installed = store.select(name)
    store.check_unchanged(installed)
    if changed := changed_files(installed.site_packages):
        raise EnvironmentFault(
            f"{len(changed)} files are not those that were installed, such as {changed[0]}", code="environment_changed"
        )
    spec = EnvironmentSpec(
        name=environment or _only(installed), arguments=dict(map(_argument, given)), package=installed.lock.package
    )
    findings = compare(lambda variables: guest_command(installed, variables), spec, problems=problems)
    if as_json:
        click.echo(json.dumps({"environment": spec.name, "findings": findings}))
    else:
        for finding in findings:
            click.echo(f"- {finding}")
        if not findings:
            click.echo(f"{spec.name}: {problems} problems, the same in every process.")
    sys.exit(1 if findings else 0)


def offered(installed: InstalledEnvironment) -> list[str]:
    """Return the names that run.toml may use of an installed package."""
    from node.environments.isolated.offers import offers

    return offers(installed)


def toml_of(installed: InstalledEnvironment) -> str:
    """Return the lines of run.toml that name an installed environment."""
    names = offered(installed)
    lines = ["[[environments]]", f'name = "{names[0] if names else "…"}"', _package_line(installed)]
    if len(names) > 1:
        more = ", ".join(names[1 : 1 + _OTHERS_SHOWN])
        lines.insert(2, f"# or: {more}{', …' if len(names) > 1 + _OTHERS_SHOWN else ''}")
    return "\n".join(lines)


def _package_line(installed: InstalledEnvironment) -> str:
    package = installed.lock.package
    lock = f'{{ digest = "{package.lock.digest}", bytes = {package.lock.bytes} }}'
    return f'package = {{ name = "{package.name}", version = "{package.version}", lock = {lock} }}'


def _named_in(text: str, installed: InstalledEnvironment) -> str:
    """Return a run.toml that names an installed environment: on the lines that name its package, else at the end."""
    pattern = re.compile(rf'^package = {{ name = "{re.escape(installed.lock.name)}",.*$', re.MULTILINE)
    line = _package_line(installed)
    if pattern.search(text):
        return pattern.sub(lambda _: line, text)
    return f"{text.rstrip()}\n\n{toml_of(installed)}\n"


def _only(installed: InstalledEnvironment) -> str:
    names = offered(installed)
    if len(names) != 1:
        raise ConfigError(f"Say which with --environment: {', '.join(names) or 'it offers none'}.")
    return names[0]


def _argument(given: str) -> tuple[str, Any]:
    """Read KEY=VALUE, VALUE as in TOML; what is none is a string."""
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise click.BadParameter(f"{given!r} is not KEY=VALUE", param_hint="--argument")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _row(installed: InstalledEnvironment) -> dict[str, Any]:
    package = installed.lock.package
    return {
        "package": package.name,
        "version": package.version,
        "python": installed.lock.python,
        "lock": {"digest": package.lock.digest, "bytes": package.lock.bytes},
        "offers": offered(installed),
        "folder": str(installed.folder),
    }
