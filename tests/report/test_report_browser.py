"""The report in a real browser: it draws, toggles, fits, is readable, and stays offline."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_report import EVIL, evaluate, make_runs, train

import fpfl

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("plotly", reason="plotly is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

GROUPS = 6
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 900}
CHARTS = {"accuracy", "gap", "rate-0", "rate-1", "multipliers-0", "multipliers-1", "counts",
          "gradient", "epsilon"}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Path]:
    return make_runs(folder / "runs")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page that was opened, and whatever it complained about or asked for.

    Every page holds plotly.js, which takes a browser a second or two: so all tests share two of
    them, and leave them as they were.
    """

    def __init__(self, browser: Any, path: Path) -> None:
        self.address = path.as_uri()
        self.page = browser.new_page(viewport=WIDE, reduced_motion="reduce", color_scheme="light")
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append("a dialog"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready=yes]")

    def draw(self, *places: str) -> None:
        """Bring charts to the screen, which is when they are drawn."""
        for place in places:
            self.page.locator(f"#{place}").scroll_into_view_if_needed()
            self.page.wait_for_selector(f"#{place} .main-svg", state="attached")

    def run(self, script: str, *given: Any) -> Any:
        return self.page.evaluate(script, *given)

    def traces(self, place: str) -> list[dict[str, Any]]:
        """A chart's traces as they are drawn: name, group, shown or not."""
        return self.run(
            """id => document.getElementById(id)._fullData.map(
                t => ({name: t.name, group: (t.meta || {}).group, raw: !!(t.meta || {}).raw,
                       shown: t.visible === true}))""",
            place,
        )

    def shown(self, place: str) -> set[str]:
        """The groups that are drawn in a chart, by the elements in its picture."""
        found = {t["group"] for t in self.traces(place) if t["shown"] and t["group"]}
        drawn = self.run(
            "id => document.querySelectorAll(`#${id} .trace, #${id} .trace.bars`).length", place
        )
        visible = sum(t["shown"] for t in self.traces(place))
        assert drawn == visible
        return found


@pytest.fixture(scope="module")
def one(browser: Any, folder: Path, runs: dict[str, Path]) -> Opened:
    """A run with six groups."""
    return Opened(browser, fpfl.write_report(runs["full"], folder / "one.html"))


@pytest.fixture(scope="module")
def many(browser: Any, folder: Path, runs: dict[str, Path]) -> Opened:
    """Five runs: private or not, finished or not, and one whose names are meant to do harm."""
    path = folder / "sigma 2"
    private = fpfl.Privacy(noise_multiplier=2.0, clip=2.0, convention="replace-one")
    evaluate(train(path, privacy=private, rounds=4), path)
    evil = folder / "<b>evil"
    shutil.copytree(runs["saved"], evil)
    for file in evil.glob("*.json"):
        name, other = (json.dumps(text)[1:-1] for text in ("sex=Male & race=A", EVIL))
        file.write_text(file.read_text().replace(name, other))
    compared = [runs["full"], runs["plain"], runs["cut"], path, evil]
    return Opened(browser, fpfl.write_report(compared, folder / "many.html"))


@pytest.fixture(params=["one", "many"])
def opened(request: pytest.FixtureRequest) -> Opened:
    found: Opened = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def nothing_else_happens(request: pytest.FixtureRequest) -> Iterator[None]:
    """No error, no warning, no dialog, and no request but for the file itself."""
    pages = [request.getfixturevalue(n) for n in ("one", "many") if n in request.fixturenames]
    pages += [request.getfixturevalue("opened")] if "opened" in request.fixturenames else []
    yield
    for page in pages:
        assert page.complaints == []
        assert page.requests == [page.address]


def test_every_chart_is_drawn(one: Opened) -> None:
    places = one.run("[...document.querySelectorAll('.plot')].map(p => p.id)")
    assert {place.removeprefix("run-0-") for place in places} == CHARTS
    one.draw(*places)
    for place in places:
        count = one.run(
            "id => document.querySelectorAll(`#${id} .scatterlayer path, #${id} .barlayer "
            "path`).length",
            place,
        )
        assert count > 0
        assert one.run("id => document.getElementById(id).clientHeight", place) > 200
    assert len(one.shown("run-0-rate-0")) == GROUPS


def test_groups_are_shown_and_hidden_by_keyboard_in_all_charts(one: Opened) -> None:
    grouped = [f"run-0-{key}" for key in ("rate-0", "rate-1", "multipliers-0", "counts")]
    one.draw(*grouped, "run-0-accuracy")
    page = one.page
    one.run("() => { document.activeElement.blur(); window.scrollTo(0, 0); }")
    page.keyboard.press("Tab")
    assert one.run("document.activeElement.className") == "skip"
    for _ in range(40):
        page.keyboard.press("Tab")
        if one.run("document.activeElement.dataset.group !== undefined"):
            break
    group = one.run("document.activeElement.dataset.group")
    ring = one.run("getComputedStyle(document.activeElement).outlineWidth")
    assert float(ring.removesuffix("px")) >= 2
    everyone = one.shown(grouped[0])
    assert group in everyone
    page.keyboard.press("Enter")
    assert one.run("document.activeElement.getAttribute('aria-pressed')") == "false"
    for place in grouped:
        assert one.shown(place) == everyone - {group}
    page.keyboard.press("Space")
    assert one.run("document.activeElement.getAttribute('aria-pressed')") == "true"
    for place in grouped:
        assert one.shown(place) == everyone
    page.get_by_role("button", name="none", exact=True).click()
    assert one.shown("run-0-rate-0") == set()
    page.get_by_role("button", name="all", exact=True).click()
    assert one.shown("run-0-rate-0") == everyone
    dots = page.get_by_role("button", name="single rounds (dots)")
    dots.press("Enter")
    assert not any(t["raw"] and t["shown"] for t in one.traces("run-0-accuracy"))
    assert any(t["shown"] for t in one.traces("run-0-accuracy"))
    dots.press("Enter")
    # plotly's own legend does the same, for all charts.
    page.locator("#run-0-rate-0 .legendtoggle").first.click()
    page.wait_for_selector("[data-group][aria-pressed=false]")
    assert one.shown("run-0-rate-1") == one.shown("run-0-rate-0") != everyone
    page.get_by_role("button", name="all", exact=True).click()


def test_nothing_is_wider_than_the_screen(opened: Opened) -> None:
    page = opened.page
    opened.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for size in (NARROW, WIDE):
        page.set_viewport_size(size)
        place = opened.run("document.querySelector('.plot').id")
        opened.draw(place)
        page.wait_for_function(
            """([id, width]) => { const p = document.getElementById(id);
                const drawn = p.querySelector('.main-svg').getBoundingClientRect().width;
                return drawn <= p.clientWidth && drawn > 0.9 * p.clientWidth; }""",
            arg=[place, size["width"]],
        )
        assert opened.run("document.documentElement.scrollWidth") <= size["width"]
    opened.run("document.querySelectorAll('details').forEach(d => { d.open = false; })")


def luminance(colour: str) -> float:
    values = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """WCAG's ratio, from 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


TEXTS = """() => [...document.querySelectorAll('main *, header *, footer *')].filter(e =>
    e.checkVisibility() && !e.closest('svg') &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
        let under = e;
        while (under && /rgba\\(.*, 0\\)/.test(getComputedStyle(under).backgroundColor))
            under = under.parentElement;
        return [getComputedStyle(e).color,
                under ? getComputedStyle(under).backgroundColor : 'rgb(255, 255, 255)',
                e.textContent.trim().slice(0, 40)];
    })"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast(scheme: str, opened: Opened) -> None:
    opened.page.emulate_media(color_scheme=scheme)
    found = opened.run(TEXTS)
    opened.page.emulate_media(color_scheme="light")
    assert len(found) > 50
    for colour, ground, text in found:
        assert contrast(colour, ground) >= 4.5, (text, colour, ground)


def test_the_scheme_follows_the_system_and_the_button(one: Opened) -> None:
    def colours() -> tuple[str, str]:
        paper = one.run("getComputedStyle(document.body).backgroundColor")
        chart = one.run("getComputedStyle(document.querySelector('#run-0-gap .xtick text')).fill")
        return paper, chart

    one.draw("run-0-gap")
    light, button = colours(), one.page.locator("#scheme")
    assert button.get_attribute("aria-pressed") == "false"
    one.page.emulate_media(color_scheme="dark")
    one.page.wait_for_selector("#scheme[aria-pressed=true]")
    dark = colours()
    assert luminance(dark[0]) < luminance(dark[1])
    assert luminance(light[0]) > luminance(light[1])
    button.press("Enter")  # against the system's
    assert colours() == light
    assert button.get_attribute("aria-pressed") == "false"
    button.press("Enter")
    assert colours() == dark
    one.page.emulate_media(color_scheme="light")
    button.press("Enter")
    assert colours() == light
    one.run("() => { localStorage.clear(); document.documentElement.dataset.scheme = 'auto'; }")


def test_a_screen_reader_finds_its_way(opened: Opened) -> None:
    levels = opened.run(
        "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => +h.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert opened.run("document.documentElement.lang") == "en"
    for landmark in ("main", "header", "footer"):
        assert opened.page.locator(landmark).count() == 1
    lacking = opened.run(
        """[...document.querySelectorAll('figure')].filter(f =>
            !document.getElementById(f.getAttribute('aria-labelledby')) ||
            !f.querySelector('[role=img][aria-label]') || !f.querySelector('figcaption') ||
            !f.querySelector('details table')).length"""
    )
    assert lacking == 0
    assert opened.run(
        """[...document.querySelectorAll('table')].every(t => t.caption &&
            t.caption.textContent && [...t.querySelectorAll('th')].every(h => h.scope) &&
            t.querySelector('tbody th'))"""
    )
    assert opened.run("[...document.querySelectorAll('button')].every(b => b.textContent.trim())")


def test_runs_are_compared_and_opened(many: Opened) -> None:
    page = many.page
    many.draw("compare-0")
    assert many.traces("compare-0")
    rows = page.locator("table.comparison").first.locator("tbody tr")
    assert rows.count() == 3  # the others were not evaluated
    assert any("best trade-off" in text for text in rows.all_inner_texts())
    assert not page.locator("#run-0-gap .main-svg").count()
    page.locator("#run-0 > summary").press("Enter")
    page.locator("nav a[href='#run-2']").press("Enter")
    page.wait_for_selector("#run-2[open]")
    assert "has not ended" in page.locator("#run-2").inner_text()
    many.draw("run-0-rate-0", "run-2-rate-0")
    # A group that is hidden in one run stays in the others.
    page.locator("#run-0 [data-group]").first.press("Enter")
    assert len(many.shown("run-0-rate-0")) == GROUPS - 1
    assert len(many.shown("run-2-rate-0")) == GROUPS


def test_names_from_a_folder_are_text(many: Opened) -> None:
    many.page.locator("nav a[href='#run-4']").press("Enter")
    assert many.page.locator("#run-4 > summary h3").inner_text() == "<b>evil"
    many.draw("run-4-rate-0")
    assert many.run("document.images.length") == 0
    assert EVIL in many.page.locator("#run-4 [data-group]").all_inner_texts()
    legend = many.run(
        "[...document.querySelectorAll('#run-4-rate-0 .legendtext')].map(e => e.textContent)"
    )
    assert EVIL in legend
    many.page.locator("#run-4 [data-group]", has_text="onerror").press("Enter")
    shown = many.shown("run-4-rate-0")
    assert len(shown) == GROUPS - 1
    assert EVIL not in shown
