"""The report in a browser: both widths, both colour schemes, no error, nothing too wide."""

import os
import shutil

import pytest

from lightning_collider.report.write import write_report

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium: the system's, or the one that playwright has fetched."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: pip install -e .[dev]"
    )
    with api.sync_playwright() as play:
        found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
        found = found or play.chromium.executable_path
        if not os.path.exists(found):
            pytest.skip("no browser: apt-get install chromium, or playwright install chromium")
        started = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, finished):
    """Function that opens the report of the tiny run and collects what the console says."""
    path = write_report([finished[1]])
    contexts = []

    def open_page(width, scheme):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page, errors = context.new_page(), []
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:")) else errors.append(r.url),
        )
        page.goto(path.resolve().as_uri())
        return page, errors

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_page_fits_and_says_no_error(opened, tmp_path, width, scheme):
    page, errors = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # what scrolls does so inside its own box, and each chart is drawn
    assert page.locator("#charts .chart").count() >= 6
    assert all(
        n > 0
        for n in page.locator("#charts svg").evaluate_all(
            "l => l.map(s => s.querySelectorAll('path').length)"
        )
    )
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in paper.removeprefix("rgb(").removesuffix(")").split(",")) > 384
    assert light == (scheme == "light")
    shot = tmp_path / "page.png"
    page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 20_000
    assert errors == []


def test_buttons_change_what_is_shown(opened):
    page, errors = opened(1280, "light")
    before = page.locator("#charts svg").first.inner_html()
    page.locator("#axis button", has_text="seconds").click()
    assert page.locator("#charts svg").first.inner_html() != before
    page.locator("#legend button").first.click()
    assert page.locator("#charts svg").first.locator("path").count() == 1
    assert page.locator("#steps button[aria-pressed=true]").inner_text() == "step 6"
    dropped = page.locator("#rows .dropped")
    assert dropped.count() > 0
    assert "line-through" in dropped.first.evaluate("e => getComputedStyle(e).textDecorationLine")
    last = page.locator("#rows").inner_html()
    page.locator("#steps button", has_text="step 0").click()
    assert page.locator("#rows").inner_html() != last
    page.locator("#rows .dropped").first.click()
    said = page.locator("#info").inner_text()
    assert said.startswith("step 0") and "excess" in said and "dropped" in said
    page.locator("#arms button", has_text="regular").click()
    assert page.locator("#rows .dropped").count() == 0
    assert errors == []


def test_pointing_at_a_chart_shows_its_values(opened):
    page, errors = opened(1280, "dark")
    box = page.locator("#charts .chart").first
    box.hover(position={"x": 200, "y": 100})
    tip = box.locator(".tip")
    assert tip.is_visible() and "regular" in tip.inner_text() and "tokens" in tip.inner_text()
    assert errors == []
