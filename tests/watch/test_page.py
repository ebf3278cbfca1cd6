"""The page in a browser, on a state without a sink. `ROWDELTA_SCREENSHOTS=docs/images` also makes the pictures of the
documents.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from sink.sources.source import Held, Slot
from sink.table import observer
from sink.watch import server as served
from sink.watch.state import State
from tests.watch.shop import HOSTILE, TABLES, serving, shop
from tests.watch.story import Clock, lags, micro_batch, new_state, opened, tell

ROOT = Path(__file__).parents[2]
COMMANDS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next((path for name in COMMANDS if (path := shutil.which(name))), None)
    if found is None:
        if "CI" in os.environ:
            pytest.fail("no Chromium found, and .ci/run should have installed it")
        pytest.skip("no Chromium found; Debian and Ubuntu: apt install chromium")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])  # which root can't have
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    made = context.new_page()
    problems: list[str] = []
    requests: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
    made.on("request", lambda request: requests.append(request.url))
    yield made
    context.close()
    # what Chromium asks for by itself isn't there
    assert [line for line in problems if "404" not in line] == []
    assert {re.sub(r"^http://127\.0\.0\.1:\d+/", "", url).partition("?")[0] for url in requests} <= {
        "", "page.css", "page.js", "state.json", "table.json", "favicon.ico",
    }  # fmt: skip


def text_of(page: Page, selector: str) -> list[str]:
    return [str(text) for text in page.locator(selector).all_inner_texts()]


def is_wider_than_its_window(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def picture(page: Page, name: str) -> None:
    folder = os.environ.get("ROWDELTA_SCREENSHOTS")
    if folder is not None:
        page.screenshot(path=ROOT / folder / name)


@pytest.fixture(scope="module")
def shopping() -> State:
    return shop()[0]


def test_five_hundred_tables_are_found_by_name_and_opened(page: Page, shopping: State) -> None:
    with serving(shopping) as address:
        page.goto(address)
        page.wait_for_selector("#tables tr")
        rows = page.locator("#tables tr")
        assert rows.count() == TABLES
        first = text_of(page, "#tables tr:first-child td")
        assert first[0].startswith("lake.shop00.coupons"), "the one with a problem comes first"
        assert "name the column's type" in first[0]
        assert first[1] == "failed"
        assert text_of(page, "#errors li")[0].splitlines()[1].startswith("lake.shop00.coupons: column amount")
        assert text_of(page, "#sink") == ["shop"]
        assert len(text_of(page, "#charts figcaption")) == 4
        lines = page.locator("#charts path").evaluate_all("paths => paths.map(path => path.getAttribute('d').length)")
        assert min(lines[:3]) > 300, "a line of an hour"
        status = page.locator("#tables tr:nth-child(2) td:nth-child(2)").bounding_box()
        assert status is not None
        assert status["height"] < 50, "one line"
        picture(page, "page.png")

        page.fill("#search", "shop07.ORD")
        assert text_of(page, "#tables tr td:first-child") == ["lake.shop07.orders"]
        assert text_of(page, "#count") == ["1 of 500"]
        page.click("#tables button")
        page.wait_for_selector(".detail dl")
        facts = dict(zip(text_of(page, ".detail dt"), text_of(page, ".detail dd"), strict=True))
        assert facts["Source"] == "shop07.orders.topic"
        assert json.loads(facts["Position"]).keys() == {"0", "1"}
        assert "commit" in facts["Time in stages"]
        page.click("#tables button")
        assert page.locator(".detail").count() == 0
        page.fill("#search", "")
        assert rows.count() == TABLES


def test_the_page_follows_the_run(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "KEPT_SECONDS", 0.0)
    clock = Clock()
    state = new_state(clock)
    with serving(state) as address:
        page.clock.install()
        page.goto(address)
        page.get_by_text("not ready", exact=True).wait_for()
        tell(state, [*opened("lake.shop.orders"), *micro_batch("lake.shop.orders", 1)])
        clock.now += 30
        state(lags({"lake.shop.orders": {"0": (12_345, 90.0)}}))
        page.clock.run_for(6_000)
        page.wait_for_selector("#tables tr")
        cells = text_of(page, "#tables td")
        assert cells == [
            "lake.shop.orders", "working", "12.3 k, 90 s", "1.8", "30 s", "1", "21", "4", "24.0 kB", "",
        ]  # fmt: skip
        assert text_of(page, "#health") == ["ready"]
        state(observer.LagsUnknown("Kafka at nowhere:9092 did not answer"))
        page.clock.run_for(6_000)
        page.wait_for_selector("#problems li")
        assert "Kafka at nowhere:9092" in text_of(page, "#problems li")[0]
        slot = Slot("shop", False, 5_200_000_000, 1, "reserved", None)
        engine = observer.EngineSeen(False, 1, "Debezium's engine has ended: no disk", Held(12, 3_000, None))
        tell(state, [engine, observer.SlotsSeen([slot])])
        page.clock.run_for(6_000)
        page.get_by_text("of the log kept for slot shop, which nobody reads").wait_for()
        totals = text_of(page, "#totals b")
        assert totals[4:8] == ["doesn't read", "–", "3.0 kB", "5.2 GB"]
        assert "no disk" in text_of(page, "#problems li")[-1]
        state._heard -= 1_000
        page.clock.run_for(6_000)
        page.get_by_text("not alive", exact=True).wait_for()


def test_names_and_errors_are_text_and_never_markup(page: Page) -> None:
    state = new_state(Clock())
    tell(state, [*opened(HOSTILE, HOSTILE), *micro_batch(HOSTILE, 1)])
    state(lags({HOSTILE: {HOSTILE: (3, 1.0)}}))
    state(observer.DeadLettersKept(HOSTILE, {HOSTILE: 1}))
    state(observer.LagsUnknown(HOSTILE))
    state(lags({HOSTILE: {HOSTILE: (3, 1.0)}}))
    state(observer.TableFailed(HOSTILE, HOSTILE, HOSTILE))
    state(observer.LagsUnknown(HOSTILE))
    with serving(state) as address:
        page.goto(address)
        page.click("#tables button")
        page.wait_for_selector(".detail dl")
        assert text_of(page, "#tables button") == [HOSTILE]
        assert page.locator("img").count() == 0
        assert page.title() == "rowdelta shop"
        assert HOSTILE in text_of(page, "#problems li")[0]
        assert HOSTILE in text_of(page, ".detail dd")[0]


def test_it_can_be_read_on_a_phone_by_day_and_by_night(page: Page, shopping: State) -> None:
    # the longest name a database has
    name = f"lake.shop.{'n' * 128}"
    tell(shopping, [*opened(name), observer.TableFailed(name, "TableError", "y" * 900)])
    page.set_viewport_size({"width": 360, "height": 740})
    with serving(shopping) as address:
        page.goto(address)
        page.wait_for_selector("#tables tr")
        assert not is_wider_than_its_window(page)
        page.fill("#search", "shop00.prices")
        page.click("#tables button")
        page.wait_for_selector(".detail dl")
        assert not is_wider_than_its_window(page)
        assert page.locator("thead").is_hidden()
        colors = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        ground, ink = map(brightness, page.evaluate(colors))
        assert ground > 200 > 100 > ink
        page.emulate_media(color_scheme="dark")
        ground, ink = map(brightness, page.evaluate(colors))
        assert ground < 100 < 200 < ink
        page.evaluate("document.querySelector('.bar').scrollIntoView()")
        picture(page, "page-phone.png")


def brightness(color: str) -> float:
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3
