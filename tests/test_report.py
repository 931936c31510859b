"""The report: one page that needs nothing else, tried in a real browser where there is one."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

import chromium
from gradplan import cli
from gradplan.bench import report
from gradplan.bench.results import read

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 2'>"


@pytest.fixture(scope="module")
def results():
    return read(RESULTS)


def embedded(text):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


def test_the_page_holds_all_rows_and_refers_to_nothing(results):
    text = report.page([results])
    found = embedded(text)
    assert len(found["runs"][0]["rows"]) == len(results["rows"])
    assert {one["peer"] for one in found["runs"][0]["speedups"]} == {"torch", "compile", "jax"}
    without_names = text.replace("http://www.w3.org/2000/svg", "")
    for word in ("http://", "https://", "@import", "url(", "fetch(", "/*css*/", "/*js*/"):
        assert word not in without_names
    assert len(re.findall(r"<script", text)) == 2


def test_what_results_hold_cannot_become_markup(results):
    evil = {**results, "device": {**results["device"], "name": EVIL}}
    text = report.page([evil])
    assert EVIL not in text
    assert embedded(text)["runs"][0]["device"]["name"] == EVIL


def test_the_command_writes_it(tmp_path):
    path = tmp_path / "new" / "r.html"
    assert cli.main(["bench", "--from", str(RESULTS), "--html", str(path)]) == 0
    assert path.read_text().startswith("<!doctype html>")


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "--from", str(RESULTS), "--png", str(tmp_path)]) == 0
    for name in ("share", "speedup", "time"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def pages(results, tmp_path_factory):
    """The committed results as a page, the same with a hostile run beside, and one that is bare."""
    folder = tmp_path_factory.mktemp("pages")
    row = {**results["rows"][0], "ms": None, "share": None, "error": EVIL, "variant": EVIL}
    about = {**results, "device": {"name": EVIL, "arch": EVIL}, "versions": {EVIL: EVIL}}
    peers = {"torch": {"ms": None, "speedup": None, "note": EVIL}}
    evil = {**about, "host_us": {}, "rows": [{**row, "case": EVIL, "peers": peers}]}
    bare = {**results, "rows": [], "host_us": {}}
    made = {"real": [results], "two": [results, evil], "evil": [evil], "bare": [bare]}
    for name, runs in made.items():
        (folder / f"{name}.html").write_text(report.page(runs), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = chromium.find()
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    page = chromium.Page(path, tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.fixture
def page(browser, pages):
    """The real page, opened anew; what it must never do is asked at the end."""
    browser.errors.clear()
    browser.requests.clear()
    browser.resize(1200)
    browser.scheme("light")
    browser.open(pages / "real.html")
    yield browser
    assert browser.errors == []
    assert browser.requests
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)


def first_cells(page, column):
    return page.run(
        f"[...document.querySelectorAll('#table tbody tr')].map(r => r.cells[{column}].textContent)"
    )


def column(page, heading):
    names = page.run("[...document.querySelectorAll('#table thead th')].map(h => h.textContent)")
    return names.index(heading)


def test_it_shows_everything(page, results):
    assert page.run("document.getElementById('device').textContent") == "NVIDIA H200"
    assert "of the floor or more" in page.run("document.getElementById('lead').textContent")
    assert len(first_cells(page, 0)) == len(results["rows"])
    # Every row is a dot of the first plot and of the roofline, and a peer's is a ring.
    shares = "document.querySelectorAll('#shares circle').length"
    assert page.run(shares) == len(results["rows"])
    rings = "document.querySelectorAll('#roofline .ring').length"
    raced = sum(1 for row in results["rows"] for peer in row["peers"].values() if peer["ms"])
    assert page.run(rings) == raced
    kinds = {row["kind"] for row in results["rows"] if row["element"] == "bf16"}
    lines = "document.querySelectorAll('#matrix tbody tr:not(.family)').length"
    assert page.run(lines) == len(kinds)


def test_a_busy_machine_is_told(page, pages, results):
    hidden = "document.getElementById('busy').hidden"
    assert page.run(hidden)
    rows = [{**row, "other_cores": 1.5} for row in results["rows"]]
    path = pages / "busy.html"
    path.write_text(report.page([{**results, "rows": rows}]), encoding="utf-8")
    page.open(path)
    assert not page.run(hidden)


def test_it_sorts_both_ways(page):
    where = column(page, "share")

    def shares():
        return [int(cell.split()[0]) for cell in first_cells(page, where)]

    page.click("#table thead button", where)
    assert shares() == sorted(shares(), reverse=True)
    state = f"document.querySelectorAll('#table thead th')[{where}].ariaSort"
    assert page.run(state) == "descending"
    page.click("#table thead button", where)
    assert shares() == sorted(shares())
    assert page.run(state) == "ascending"
    # What has no value stays below, whichever way it is sorted.
    where = column(page, "over JAX")
    for _ in range(2):
        page.click("#table thead button", where)
        cells = first_cells(page, where)
        assert cells[0]
        assert not cells[-1]


def test_it_filters_tables_and_plots(page, results):
    choose = (
        "(box => { box.value = 'scan'; box.dispatchEvent(new Event('change')); })"
        "(document.getElementById('family'))"
    )
    page.run(choose)
    scans = [row for row in results["rows"] if row["family"] == "scan"]
    assert len(first_cells(page, 0)) == len(scans)
    assert page.run("document.querySelectorAll('#shares circle').length") == len(scans)
    count = "document.getElementById('count').textContent"
    assert page.run(count) == f"{len(scans)} of {len(results['rows'])} rows"
    page.type("#find", "cumprod bf16")
    few = [row for row in scans if row["kind"] == "cumprod" and row["element"] == "bf16"]
    assert len(first_cells(page, 0)) == len(few)
    page.type("#find", " nonsense")
    assert first_cells(page, 0) == []
    assert "No row matches" in page.run("document.getElementById('shares').textContent")


@pytest.mark.parametrize("width", [380, 600, 700, 1200])
def test_no_page_is_wider_than_its_window(page, width):
    page.resize(width)
    # Plots are drawn again at the size they have: their text is as large as the page's.
    sizes = (
        "[...document.querySelectorAll('svg')].map(s => s.clientWidth / s.viewBox.baseVal.width)"
    )
    for _ in range(40):
        found = page.run(sizes)
        if all(0.95 < size < 1.05 for size in found):
            break
        time.sleep(0.05)
    assert all(0.95 < size < 1.05 for size in found)
    assert page.run("document.documentElement.scrollWidth") <= width
    box = "(t => t.scrollWidth > t.clientWidth)(document.getElementById('table'))"
    assert page.run(box) or width > 700


def luminance(page, selector, key):
    code = f"getComputedStyle(document.querySelector({selector!r})).{key}"
    red, green, blue = (int(n) / 255 for n in re.findall(r"\d+", page.run(code))[:3])

    def linear(c):
        return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4

    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_light_and_dark(page, scheme):
    page.scheme(scheme)
    page.open(Path(page.run("decodeURI(location.pathname)")))

    def dark():
        return luminance(page, "body", "backgroundColor") < 0.2

    assert dark() == (scheme == "dark")
    for selector in ("h1", "p", "#table td", "#machine td"):
        back = luminance(page, "section:not(#top)", "backgroundColor")
        ink = luminance(page, selector, "color")
        assert (max(back, ink) + 0.05) / (min(back, ink) + 0.05) > 4.5, selector
    page.click("#theme")
    assert dark() != (scheme == "dark")
    page.click("#theme")
    assert dark() == (scheme == "dark")


def test_cells_of_the_matrix_can_be_read(page):
    # Every tint, in both themes: the text has a contrast of 4 or more.
    code = """
    (() => {
      const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
      const of = text => {
        probe.fillStyle = text; probe.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].map(c => c / 255)
          .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
      };
      return Math.min(...[...document.querySelectorAll("#matrix td")].filter(c => c.textContent)
        .map(c => { const s = getComputedStyle(c); return [of(s.color), of(s.backgroundColor)]; })
        .map(([a, b]) => Math.max(a, b) / Math.min(a, b)));
    })()"""
    assert page.run(code) > 4
    page.click("#theme")
    assert page.run(code) > 4


def test_a_dot_says_what_it_is(page):
    place = (
        "(dot => { dot.scrollIntoView({block: 'center'}); const b = dot.getBoundingClientRect();"
        " return [b.x + b.width / 2, b.y + b.height / 2]; })"
        "(document.querySelector('#shares circle'))"
    )
    x, y = page.run(place)
    for _ in range(40):  # scrolling, which hides it, may go on for some frames
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if not page.run("document.getElementById('tip').hidden"):
            break
        time.sleep(0.05)
    assert "of the floor" in page.run("document.getElementById('tip').textContent")


def test_several_runs_are_chosen_from(page, pages, results):
    assert page.run("document.getElementById('pick').hidden")
    page.open(pages / "two.html")
    assert not page.run("document.getElementById('pick').hidden")
    choose = (
        "(box => { box.value = '1'; box.dispatchEvent(new Event('change')); })"
        "(document.getElementById('run'))"
    )
    page.run(choose)
    assert page.run("document.getElementById('device').textContent") == EVIL
    assert len(first_cells(page, 0)) == 1


@pytest.mark.parametrize("name", ["evil", "bare"])
def test_hostile_and_empty_results_do_no_harm(page, pages, name):
    page.open(pages / f"{name}.html")
    assert page.run("window.evil") is None
    assert page.run("document.images.length") == 0
    assert "of the floor" in page.run("document.body.textContent")
