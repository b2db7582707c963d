"""One server of the shipped model for all tests of this folder."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = [name for name in ("fastapi", "uvicorn", "httpx", "openai", "multipart") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture(scope="session")
def tiny():
    """Serve the shipped model: (URL, Server)."""
    from http_server import TINY, serving

    with serving(TINY, "tiny-vl", max_model_len=1024) as served:
        yield served


@pytest.fixture(scope="session")
def tiny_asr():
    """Serve the shipped speech model: (URL, Server)."""
    from http_server import TINY, serving

    with serving(TINY.parent / "tiny-asr", "tiny-asr") as served:
        yield served


@pytest.fixture(scope="session")
def http(tiny):
    import httpx

    with httpx.Client(base_url=tiny[0], timeout=240) as client:
        yield client


@pytest.fixture(scope="session")
def client(tiny):
    from http_server import openai_client

    with openai_client(tiny[0]) as client:
        yield client


@pytest.fixture(scope="session")
def tools(tiny):
    """Serve the shipped model with a template that takes tools: (client of openai, Server)."""
    from http_server import TINY, openai_client, serving

    template = tiny[1].engine.tokenizer.chat_template
    template = "{% if tools %}{{ tools | tojson }}{{ '<tool_call>' }}{% endif %}" + template
    with serving(TINY, "tiny-vl", max_model_len=1024, chat_template=template) as (url, server), openai_client(url) as client:
        yield client, server


@pytest.fixture(scope="module")
def chromium():
    """Return a function that opens Chromium with further arguments: the system's, or Playwright's own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("SENSORIUM_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_api.sync_playwright() as playwright:
        if path is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("the page's tests need Chromium: apt-get install chromium, or playwright install chromium")
        opened = []

        def launch(*args):
            opened.append(playwright.chromium.launch(executable_path=path, args=["--no-sandbox", *args]))
            return opened[-1]

        yield launch
        for browser in opened:
            browser.close()


@pytest.fixture(scope="module")
def browser(chromium):
    return chromium()


@pytest.fixture
def open_page(browser):
    """Return a function that opens the page of a server; errors in its console fail the test."""
    contexts, errors = [], []

    def open_page(url, browser=browser, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(120_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.on("request", lambda one: one.url.startswith((url, "data:", "blob:")) or errors.append(one.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not [error for error in errors if "the server responded with a status" not in error]


@pytest.fixture
def page(open_page, tiny):
    page = open_page(tiny[0])
    page.locator("#model", has_text="tiny-vl").wait_for()
    return page
