"""Take the screenshots of the page for docs/server.md: `python docs/make_screenshots.py`. It needs playwright and Chromium."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "assets"
sys.path.insert(0, str(ROOT / "examples"))

from shared import serving  # noqa: E402


def answer(page: Any, number: int) -> None:
    """Wait until the answer with this number is complete."""
    page.locator(".meta").nth(number).wait_for()
    page.locator("#send").wait_for()


def read(page: Any) -> None:
    """Read two images; the first one warms the engine up. Show the second answer with the grid of encoder rows."""
    for number, name in enumerate(("receipt2.png", "receipt1.png")):
        if number:
            page.get_by_role("button", name="New").click()
        page.get_by_text("Read", exact=True).click()
        page.set_input_files("#choose", ASSETS / "media" / name)
        page.get_by_role("button", name=f"Remove {name}").wait_for()
        page.locator("#text").fill("Read the receipt.")
        page.keyboard.press("Enter")
        answer(page, 0)


def transcribe(page: Any) -> None:
    """Transcribe a file, and play it from one of its words."""
    page.set_input_files("#choose", ASSETS / "speech" / "alarm.flac")
    page.get_by_role("button", name="Send").click()
    page.locator(".word").first.wait_for()
    answer(page, 0)
    page.locator(".word", has_text="seven").click()
    page.locator(".word.now", has_text="seven").wait_for()


def main() -> None:
    path = os.environ.get("SENSORIUM_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for model, show, name in ("tiny-vl", read, "page.png"), ("tiny-asr", transcribe, "page-speech.png"):
            with serving(str(ASSETS / model)) as url:
                page = browser.new_page(viewport={"width": 900, "height": 640})
                page.set_default_timeout(300_000)
                page.goto(url)
                page.locator("#model", has_text=model).wait_for()
                show(page)
                page.screenshot(path=ROOT / "docs" / name)
        browser.close()


if __name__ == "__main__":
    main()
