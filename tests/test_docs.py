"""The site builds, needs no network, and tells what is true; so do the project's own pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import chromium
import gradplan as gp
from blocks import PageError, blocks_of, run, with_outputs
from edges import EDGES, LIBRARIES, RECORD, installed, result
from gradplan.registry import KINDS
from tables import expanded

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "pages"


class Assets(HTMLParser):
    """What a page loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.urls.append(given.get("src") or "")
        if tag == "link" and given.get("rel") not in ("next", "prev", "canonical"):
            self.urls.append(given.get("href") or "")


@pytest.mark.slow
def test_the_site_builds_and_is_whole(tmp_path: Path) -> None:
    """One build for all: it runs every block of every page."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("torch")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}
    for source in PAGES.rglob("*.md"):
        assert str(source.relative_to(PAGES).with_suffix(".html")) in pages
    nothing_comes_from_elsewhere(site, pages)
    nothing_is_left_unfilled(pages)
    reference = "".join(text for name, text in pages.items() if name.startswith("api"))
    for name in gp.__all__:
        assert f'id="gradplan.{name}"' in reference, name
    for spec in KINDS.values():
        assert spec.formula in pages["families/index.html"]
    for results in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert json.loads(results.read_text())["device"]["name"] in pages["measured.html"]
    for command in ("verify", "bench", "tune", "list"):
        assert f"usage: gradplan {command}" in pages["command-line.html"]
        assert f"gradplan {command}" in pages["index.html"]
    for example in (ROOT / "examples").glob("*.py"):
        assert (example.name in pages["examples.html"]) == ("__main__" in example.read_text())
    if browser := chromium.find():
        it_works_from_disk(browser, site, pages)


def nothing_comes_from_elsewhere(site: Path, pages: dict[str, str]) -> None:
    for name, text in pages.items():
        outside = [url for url in Assets(text).urls if re.match(r"(\w+:)?//", url)]
        assert not outside, (name, outside)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def nothing_is_left_unfilled(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert not re.search(r"<p>\s*\{\{", text), name
        assert "arithmatex" not in text, name
    assert "<math" in pages["families/scan.html"]
    assert "<svg" in pages["how-it-works.html"]
    assert re.search(r'class="[^"]*\boutput\b', pages["concepts.html"])


def it_works_from_disk(browser: str, site: Path, pages: dict[str, str]) -> None:
    """In a browser without a network: no page has errors or is wider than a phone; search finds."""
    tab = chromium.Page(browser, site.parent / "profile", width=390)
    try:
        for name in pages.keys() - {"404.html"}:  # a server's, with a server's paths
            shown(tab, site / name)
            assert tab.run("document.documentElement.scrollWidth") <= 390, name
        tab.resize(1200)
        shown(tab, site / "index.html")
        tab.type(".md-search__input", "scale_grad_by_freq")
        links = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        found = eventually(lambda: tab.run(links))
        assert any("families/embedding.html" in url for url in found), found
        assert not tab.errors
        assert all(url.startswith(("file:", "data:", "about:")) for url in tab.requests)
    finally:
        tab.close()


def shown(tab: Any, path: Path) -> None:
    """Open a page, and wait until it is this one that is there."""
    tab.open(path)
    here = f"location.href === {path.as_uri()!r} && document.readyState === 'complete'"
    assert eventually(lambda: tab.run(here)), path


def eventually(asked: Callable[[], Any]) -> Any:
    """The first answer that is not empty, within a while."""
    end = time.monotonic() + 20
    while not (answer := asked()) and time.monotonic() < end:
        time.sleep(0.05)
    return answer


@pytest.mark.parametrize("library", LIBRARIES)
def test_edges_are_as_recorded(library: str) -> None:
    record = json.loads(RECORD.read_text())
    version = installed(library)
    if library != "gradplan" and version != record["versions"][library]:
        pytest.skip(f"{library} {record['versions'][library]} was recorded, {version} is here")
    for edge, row in zip(EDGES, record["rows"], strict=True):
        assert (row["kind"], row["title"]) == (edge.kind.value, edge.title)
        assert result(edge, library) == row[library], edge


def test_edges_meet_every_family() -> None:
    assert {edge.spec.category for edge in EDGES} == {category for category, _ in KINDS}


def test_blocks_share_a_page_and_show_what_they_print() -> None:
    page = "a\n\n```python\nx = 2\n```\n\nb\n\n```python\nprint(x + 1)\n```\n"
    made = with_outputs(page, "page.md")
    assert "``` { .text .output }\n3\n```" in made
    assert made.startswith(page)


def test_a_block_that_fails_is_told_by_its_line() -> None:
    page = "# Title\n\n```python\nx = 1\n```\n\n```python\n\nx / 0\n```\n"
    with pytest.raises(PageError, match=r'(?s)File "page.md", line 9.*ZeroDivisionError'):
        with_outputs(page, "page.md")


def test_a_block_for_a_gpu_is_read_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blocks._has_gpu", lambda: False)
    page = '```python title="On a GPU"\nraise SystemExit(3)\n```\n'
    (block,) = blocks_of(page)
    assert run([block], "page.md") == [""]
    with pytest.raises(SyntaxError):
        run(blocks_of(page.replace("raise", "raise raise")), "page.md")


def test_an_unknown_directive_is_an_error() -> None:
    assert "`cumsum`" in expanded("{{ support scan }}")
    assert "`softmax`" not in expanded("{{ support scan }}")
    with pytest.raises(KeyError):
        expanded("{{ suport scan }}")


def test_the_steps_for_a_new_kind_name_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(paths) >= 10
    for path in paths:
        assert (ROOT / "src" / "gradplan" / path).exists() or (ROOT / path).exists(), path


def test_make_explains_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.*)", makefile, re.MULTILINE)
    said = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = re.findall(r"^  make (\S+) +\S", said.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(targets.split())


def test_templates_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    forms = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for form in forms:
        read = yaml.safe_load(form.read_text())
        assert form.name == "config.yml" or {"name", "description", "body"} <= read.keys()
    assert len(forms) >= 3


def test_the_changelog_names_what_is_not_released() -> None:
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    for released in headings[1:]:
        assert re.fullmatch(r"\[?\d+\.\d+\.\d+\]? [-–] \d{4}-\d\d-\d\d", released)
