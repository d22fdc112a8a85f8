"""The pages in headless Chromium: what they complain about, how they fit a screen, and who can read and use them."""

from __future__ import annotations

import base64
import io
import itertools
import time
from pathlib import Path

import pytest
from PIL import Image

from graphtune.figures.csv_data import csv_text
from graphtune.report import page
from tests.browser.chromium import Chromium
from tests.browser.conftest import BOTH_PHASES, PAGES
from tests.synthetic import both_phases_sweep

pytestmark = pytest.mark.browser

CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
LEAST_CONTRAST = 4.5
WIDTHS = (390, 1280, 1920)
OPEN_ALL = "document.querySelectorAll('details').forEach(function (one) { one.open = true })"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_stands_out_and_complains_of_nothing(
    chromium: Chromium, pages: dict[str, Path], name: str, width: int, theme: str
) -> None:
    chromium.open(pages[name], width, theme)
    assert pages[name].stat().st_size < 2_000_000
    content = chromium.screenshot(f"{name} {width} {theme}")
    image = Image.open(io.BytesIO(content))
    corner = image.convert("RGB").getpixel((2, 2))
    assert isinstance(corner, tuple) and (sum(corner) > 380) == (theme == "light")
    assert image.width == width, "the page is wider than the screen"
    chromium.js(OPEN_ALL)
    assert chromium.js("return document.documentElement.scrollWidth") <= width, "with all tables open"
    height = chromium.js("return document.documentElement.scrollHeight")
    chromium.cdp(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
    )
    seen, faint = chromium.js(CONTRAST, LEAST_CONTRAST)
    assert not faint
    assert seen > 20
    assert chromium.js("return performance.getEntriesByType('resource').length") == 0
    assert chromium.js("return window.ran") is None, "a name was run as a script"
    assert chromium.console() == []


@pytest.mark.parametrize("width", [720, 721, 1000])
def test_nothing_scrolls_sideways_where_the_layout_changes(
    chromium: Chromium, pages: dict[str, Path], width: int
) -> None:
    chromium.open(pages["both phases"], width)
    chromium.js(OPEN_ALL)
    assert chromium.js("return document.documentElement.scrollWidth") <= width
    shown = "return [...document.querySelectorAll('.wide, .narrow')].filter(e => e.checkVisibility()).length"
    assert chromium.js(shown) == chromium.js("return document.querySelectorAll('figure').length")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_cell_of_the_answer_reaches_into_the_next(chromium: Chromium, pages: dict[str, Path], width: int) -> None:
    chromium.open(pages["both phases"], width)
    overlaps = """
    var found = [], range = document.createRange();
    document.querySelectorAll(".compare tr").forEach(function (row) {
      var edge = -1;
      [...row.children].forEach(function (cell) {
        if (!cell.textContent.trim()) { return; }
        range.selectNodeContents(cell);
        var box = range.getBoundingClientRect();
        if (box.left < edge + 6) { found.push(row.textContent); }
        edge = box.right;
      });
    });
    return found;
    """
    assert chromium.js(overlaps) == []


def test_copy_puts_the_flags_on_the_clipboard(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["both phases"])
    for index in range(3):
        chromium.js("document.querySelectorAll('button.copy')[arguments[0]].click()", index)
        # The word stands for a second and a half, so it is waited for in the page itself.
        copied = chromium.driver.execute_async_script(
            "var button = document.querySelectorAll('button.copy')[arguments[0]], done = arguments[1];"
            "var asking = setInterval(function () {"
            "  if (button.firstElementChild.textContent !== 'Copied') return;"
            "  clearInterval(asking);"
            "  navigator.clipboard.readText().then(done, e => done('' + e));"
            "}, 20)",
            index,
        )
        shown = chromium.js("return document.querySelectorAll('.flags code')[arguments[0]].textContent", index)
        assert copied == shown and len(copied) > 20


def test_without_a_clipboard_the_flags_are_selected(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["both phases"])
    chromium.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    chromium.js("document.querySelector('button.copy').click()")
    selected = chromium.js("return getSelection().toString()")
    assert selected == chromium.js("return document.querySelector('.flags code').innerText")


def test_a_csv_is_saved_under_its_figure_s_name(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["both phases"])
    chromium.js(OPEN_ALL)
    chromium.js("document.querySelector('#figure-step-time a[download]').click()")
    target = chromium.downloads / "step-time-against-requests.csv"
    deadline = time.monotonic() + 20
    while not target.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    sections = page(both_phases_sweep(), BOTH_PHASES)["sections"]
    drawn = next(one for section in sections for one in section.drawings if one.slug == "step-time")
    assert target.read_text(encoding="utf-8") == csv_text(drawn.data)


def press(chromium: Chromium, key: str) -> None:
    code = {"Tab": 9, "Enter": 13}[key]
    text = {"text": "\r"} if key == "Enter" else {}
    chromium.cdp("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
    chromium.cdp("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)


def test_the_keyboard_reaches_everything_that_does_something(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["both phases"])
    press(chromium, "Tab")
    assert chromium.js("return document.activeElement.className") == "skip"
    press(chromium, "Enter")
    assert chromium.js("return document.activeElement.id") == "answer"
    wanted = chromium.js(
        "return [...document.querySelectorAll('#answer :is(a, button, summary, [tabindex=\"0\"])')]"
        ".filter(e => e.checkVisibility()).length"
    )
    reached = []
    for _ in range(wanted):
        press(chromium, "Tab")
        reached.append(chromium.js("return document.activeElement.tagName"))
        inside = "return document.activeElement.closest('section').id"
        assert chromium.js(inside) == "answer"
        assert chromium.js("return getComputedStyle(document.activeElement).outlineStyle") != "none", reached
    assert {"BUTTON", "PRE", "DIV", "SUMMARY"} <= set(reached)
    press(chromium, "Enter")
    assert chromium.js("return document.activeElement.parentElement.open"), "the words of the section"


@pytest.mark.parametrize("name", PAGES)
def test_a_screen_reader_gets_a_name_for_everything(chromium: Chromium, pages: dict[str, Path], name: str) -> None:
    chromium.open(pages[name], 390)
    chromium.js(OPEN_ALL)
    nodes = chromium.cdp("Accessibility.getFullAXTree")["nodes"]
    roles = {"link", "button", "region", "image", "navigation", "figure", "table", "heading", "DisclosureTriangle"}
    named = {"link", "button", "region", "image", "navigation", "heading"}
    found = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    shown = [(role, text) for role, text in found if role in roles]
    assert [role for role, text in shown if role in named and not text.strip()] == []
    levels = [
        int(tag[1]) for tag in chromium.js("return [...document.querySelectorAll('h1,h2,h3')].map(e => e.tagName)")
    ]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels)), "a level is skipped"
    images = [text for role, text in shown if role == "image"]
    assert len(images) == len(set(images)), "two figures of one name, or a figure read twice"


def test_a_page_prints_dark_on_white_with_wide_figures(chromium: Chromium, pages: dict[str, Path]) -> None:
    chromium.open(pages["both phases"], 760, "dark", media="print")
    assert chromium.js("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not chromium.js("return document.querySelector('nav').checkVisibility()")
    assert chromium.js("return document.querySelector('.wide').checkVisibility()")
    height = chromium.js("return document.documentElement.scrollHeight")
    chromium.cdp("Emulation.setDeviceMetricsOverride", width=760, height=height, deviceScaleFactor=1, mobile=False)
    seen, faint = chromium.js(CONTRAST, LEAST_CONTRAST)
    assert seen > 100 and not faint
    printed = base64.b64decode(chromium.cdp("Page.printToPDF", printBackground=False)["data"])
    assert printed.startswith(b"%PDF") and 5 <= printed.count(b"/Type /Page\n") <= 40
