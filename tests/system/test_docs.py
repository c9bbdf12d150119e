"""The documentation as its readers have it: in the repository, and as a site that is built from the same files."""

from __future__ import annotations

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import click
import pytest
from locations import ROOT
from pymdownx.slugs import slugify

from node.cli import main

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("benchmarks/**/*.md")])
FENCE = re.compile(r"^ *(```+).*?^ *\1", re.MULTILINE | re.DOTALL)
PATCH = re.compile(r"^```diff title=.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
GENERATED = {DOCS / "command-line.md"}


def prose(page):
    return CODE.sub("", FENCE.sub("", page.read_text()))


def anchors(page):
    """The names of a page's headings, as GitHub and the site make them."""
    name = slugify(case="lower")
    return {name(re.sub(r"[`*]|\]\([^)]*\)|\[(?=[^\]]*\]\()", "", head), "-") for head in headings(page)}


def headings(page):
    return HEADING.findall(FENCE.sub("", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        address = urlsplit(target)
        if address.scheme:
            assert address.scheme == "https", f"{target}: somebody between could change what a reader gets"
            continue
        there = page if not address.path else (page.parent / address.path).resolve()
        assert there.exists(), target
        if address.fragment:
            assert address.fragment in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_patches_fit_the_code_that_is_here(page, tmp_path):
    """Who follows a tutorial applies them to this release."""
    for number, patch in enumerate(PATCH.findall(page.read_text())):
        file = tmp_path / f"{number}.patch"
        file.write_text(patch)
        subprocess.run(["git", "apply", "--check", file], cwd=ROOT, check=True)


def test_an_anchor_names_one_heading():
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            assert len(anchors(page)) == len(headings(page)), f"{page}: two headings of one name"


def commands():
    """Every command by the words that name it."""

    def walk(command, ctx, words):
        yield words, command
        if isinstance(command, click.Group):
            for name in command.list_commands(ctx):
                inner = command.get_command(ctx, name)
                yield from walk(inner, click.Context(inner, parent=ctx, info_name=name), (*words, name))

    return dict(walk(main, click.Context(main, info_name="swarmproof"), ("swarmproof",)))


COMMANDS = commands()
SHOWN = re.compile(
    r"(?<![\w/.\"-])swarmproof (?:--config \S+ |--log-format \S+ )?([a-z][a-z-]*(?: [a-z][a-z-]*)?)([^\n`|;]*)"
)


def shown_commands(page):
    """(command, its flags) of each command that a fence of `page` shows."""
    for fence in FENCE.finditer(page.read_text()):
        text = fence[0].replace("\\\n", " ")
        for found in SHOWN.finditer(text):
            words = ("swarmproof", *found[1].split())
            while words not in COMMANDS:
                words = words[:-1]
            yield words, re.findall(r"(?<=\s)--[a-z-]+", found[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_are_shown_exist_with_their_flags(page):
    if page.name == "CHANGELOG.md":
        return  # it tells of the past
    for words, flags in shown_commands(page):
        assert len(words) > 1, f"{page} shows a command that there is not"
        known = {flag for option in COMMANDS[words].params for flag in (*option.opts, *option.secondary_opts)}
        assert set(flags) <= known | {"--help"}, " ".join(words)


def test_the_check_of_shown_commands_sees_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\n$ swarmproof keys new run.key\nswarmproof worker --join x \\\n  --sloths 3\n```\n")
    assert list(shown_commands(page)) == [
        (("swarmproof", "keys", "new"), []),
        (("swarmproof", "worker"), ["--join", "--sloths"]),
    ]


def test_nobody_is_sent_to_the_index_for_a_package_of_another_project():
    """`swarmproof` on PyPI is somebody else's: who installs it by name runs their code."""
    for page in PAGES:
        installed = re.findall(r"(?:pip3?|uv|pipx)\s+(?:\w+\s+)*install\s+([^`\n]*)", page.read_text())
        words = " ".join(installed).split()
        named = [word for word in words if re.match(r"[\"']?swarmproof(\[|[=<>~]|[\"']?$)", word)]
        assert not named, page


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert built.returncode == 0, built.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser fetches on account of a page, without a click."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if (tag, name) != ("a", "href") and name in ("src", "href", "srcset", "data", "poster", "action"):
                self.addresses.append(value or "")


def test_the_site_has_every_page_and_the_files_they_name(site):
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in {*DOCS.rglob("*.md"), *GENERATED}}
    pages = {page.with_name("index.html") if page.name == "README.html" else page for page in pages}
    assert {path.relative_to(site) for path in site.rglob("*.html")} == pages | {Path("404.html")}
    assert (site / "repository/benchmarks/baselines/load.json").read_bytes() == (
        ROOT / "benchmarks/baselines/load.json"
    ).read_bytes()


def test_links_of_the_site_lead_to_its_files(site):
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue  # served at any address, so that its links begin at the root
        for target in re.findall(r'<a [^>]*href="([^"]+)"', page.read_text()):
            address = urlsplit(target)
            if not address.scheme and address.path:
                assert (page.parent / address.path).resolve().exists(), (page, target)


def test_reading_the_site_asks_nobody_else(site):
    """Readers are on machines without a way out, and nobody else learns what they read."""
    for page in site.rglob("*.html"):
        elsewhere = [where for where in Loaded(page.read_text()).addresses if urlsplit(where).netloc]
        assert not elsewhere, page
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", sheet.read_text()), sheet


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_the_site_in_a_browser_finds_what_is_searched_and_stays_at_home(site):
    sync_api = pytest.importorskip("playwright.sync_api")
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 390, "height": 844})
            asked, wrong = [], []
            page.on("request", lambda request: asked.append(request.url))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.goto(f"{home}/run-toml.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, "the page is wider than a phone"
            page.goto(f"{home}/index.html")
            page.locator("label[for=__search]").first.click()
            page.locator("input[name=query]").press_sequentially("checkpoint")
            page.locator(".md-search-result__link").first.wait_for()
            browser.close()
        server.shutdown()
    assert not wrong
    assert {url.rpartition("/")[0] for url in asked if not url.startswith((home, "blob:", "data:"))} == set()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_the_page_of_the_command_line_has_every_command_and_flag(site):
    text = (site / "command-line.html").read_text()
    for words, command in COMMANDS.items():
        if words == ("swarmproof",) or command.hidden:
            continue
        assert f">{' '.join(words[1:])}<" in text, words
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert max(option.opts, key=len) in text, (words, option.opts)
