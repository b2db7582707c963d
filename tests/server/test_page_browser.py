"""The page at `/` in headless Chromium."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import httpx
import pytest
import soundfile
from drafting import drafting, free_drafter
from http_server import MEDIA, TINY, listening, serving_models
from sensorium.server.config import ServerConfig
from sensorium.server.state import Server
from waiting import assert_idle, wait_until

pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")


def add(page, *names):
    page.set_input_files("#choose", [MEDIA / name for name in names])


def answer(page, index=0):
    page.locator("#send").wait_for()
    return page.locator(".answer").nth(index).inner_text()


def test_an_image_is_read(page, tiny):
    llm = tiny[1].llm.llm
    llm.sleep()  # empties the caches, so that all stages are shown
    llm.wake_up()
    llm.reset_mm_cache()
    assert page.locator("#tasks label").all_inner_texts() == ["Ask", "Read", "Find"]
    page.get_by_text("Read", exact=True).click()
    add(page, "receipt1.png")
    page.get_by_role("button", name="Remove receipt1.png").wait_for()
    page.locator("#text").fill("Read the receipt.")
    page.keyboard.press("Enter")
    assert answer(page) == "ICG4 114\nCOFFEE 29.93\nTOTAL 17.04"
    meta = page.locator(".meta").inner_text()
    assert all(name in meta for name in ("queue", "decode", "encode", "prefill", "per token", "encoder rows"))
    assert page.locator(".grid line").count() > 4


def test_details_have_the_drafted_tokens(page, tiny):
    """The second time, the answer of the first is the draft."""
    with drafting(tiny[1], free_drafter(tiny[1].engine.info.vocab_size)):
        for index in range(2):
            page.locator("#tasks").get_by_text("Read", exact=True).click()
            add(page, "receipt1.png")
            page.get_by_role("button", name="Remove receipt1.png").wait_for()
            page.locator("#text").fill("Read the receipt.")
            page.keyboard.press("Enter")
            assert answer(page, index)
    (meta,) = re.findall(r"drafted tokens\s+(\d+) of (\d+) accepted", page.locator(".meta").nth(1).inner_text())
    assert 0 < int(meta[0]) <= int(meta[1])


def test_one_of_several_models_is_chosen(open_page):
    models = [{"name": ["eye", "other"], "path": str(TINY)}, {"name": "ear", "path": str(TINY.parent / "tiny-asr")}]
    with serving_models(ServerConfig(models=models), max_model_len=None) as (url, _):
        page = open_page(url)
        choice = page.get_by_label("Model", exact=True)
        choice.wait_for()
        assert choice.locator("option").all_inner_texts() == ["eye", "ear"]
        assert page.locator("#tasks label").all_inner_texts() == ["Ask", "Read", "Find"]
        choice.select_option("ear")
        assert page.locator("#tasks label").all_inner_texts()[0] == "Transcribe"
        sound = min((TINY.parent / "speech").glob("*.flac"))
        page.set_input_files("#choose", [sound])
        page.keyboard.press("Enter")
        page.locator(".word", has_text="alarm").wait_for()


def test_files_that_are_removed_are_freed(page):
    page.evaluate("() => { window.freed = []; URL.revokeObjectURL = (url) => window.freed.push(url); }")
    add(page, "receipt1.png")
    url = page.locator("#files img").get_attribute("src")
    page.get_by_role("button", name="Remove receipt1.png").click()
    assert page.evaluate("() => window.freed") == [url]


def test_any_key_is_the_name_of_a_subprotocol(page):
    found = page.evaluate("""async () => {
        const seen = [];
        window.WebSocket = class { constructor(url, names) { seen.push(...names); } close() {} };
        const { setKey } = await import("/page/api.js");
        const { LiveSession } = await import("/page/realtime.js");
        setKey("a/b=+\u00e9?>");
        new LiveSession("m", new AbortController().signal, () => {});
        return seen;
    }""")
    assert found == ["realtime", "sensorium-api-key-base64url.YS9iPSvDqT8-"]


def test_a_request_without_what_it_needs_says_so(page):
    page.keyboard.press("Enter")
    page.locator("#text").press("Enter")
    assert page.get_by_role("alert").inner_text() == "Write what you want to know."
    page.get_by_text("Read", exact=True).click()
    page.get_by_role("button", name="Send").click()
    assert page.get_by_role("alert").inner_text() == "Add a file first: image or pdf."
    page.set_input_files("#choose", files=[{"name": "a.wav", "mimeType": "audio/wav", "buffer": b"RIFF"}])
    assert page.get_by_role("alert").inner_text() == "a.wav: this model takes image and video, not audio."


def test_an_error_of_the_server_is_shown(page):
    page.set_input_files("#choose", files=[{"name": "a.png", "mimeType": "image/png", "buffer": b"no image"}])
    page.locator("#text").fill("<b>What</b> is this?")
    page.get_by_role("button", name="Send").click()
    page.locator(".wrong", has_text="image").wait_for()
    assert "<b>What</b>" in page.locator(".request").inner_text()


def test_the_key_is_typed_once(open_page, tiny):
    with listening(Server(tiny[1].llm, ServerConfig(api_key="secret"), "tiny-vl")) as url:
        page = open_page(url)
        page.get_by_label("Key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        page.locator("#model", has_text="tiny-vl").wait_for()
        page.reload()
        page.locator("#model", has_text="tiny-vl").wait_for()
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]


def answer_with(page, text):
    """Let the server answer every question with this text."""
    chunks = [
        {"choices": [{"delta": {"content": text}}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    ]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    events = f": waiting\n\n{events}"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream"))


def test_escape_stops_a_stream(page, tiny, monkeypatch):
    llm = tiny[1].llm.llm
    monkeypatch.setattr(llm.engine, "default_params", replace(llm.default_params, ignore_eos=True))
    core, step = llm.engine.loop.core, llm.engine.loop.core.step
    monkeypatch.setattr(core, "step", lambda: (time.sleep(0.03), step())[1])  # so that the answer lasts until it is stopped
    page.locator("#text").fill("Read the text.")
    page.keyboard.press("Enter")
    page.locator(".answer", has_text=re.compile(".{5}", re.DOTALL)).wait_for()
    page.get_by_role("button", name="Stop").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").first.wait_for()
    assert len(answer(page)) > 4
    wait_until(lambda: not llm.engine.loop._names)  # the server hears of it after the page
    assert_idle(llm)


BOXES = """[{"bbox_2d": [8, 16, 40, 32], "label": "<i>cup</i>"}, {"point_2d": [4, 8]}, {"bbox_2d": [1"""
FORMS = [
    ("Qwen2_5_VLForConditionalGeneration", BOXES, [[16, 32, 80, 64], [8, 16]]),  # pixels of the resized image
    ("Qwen3VLForConditionalGeneration", BOXES, [[1.6, 1.6, 8, 3.2], [0.8, 0.8]]),  # thousandths
    (
        "paligemma",
        "<loc0256><loc0512><loc0768><loc1023> cat ; <loc0000><loc0000><loc0512><loc0512> dog",
        [[100, 25, 199.8, 75], [0, 0, 100, 50]],
    ),
    ("MolmoForCausalLM", '<point x="10.0" y="20.5" alt="cup">cup</point>', [[20, 20.5]]),
    ("MolmoForCausalLM", '<points x1="10" y1="20" x2="30" y2="40" alt="cups">cups</points>', [[20, 20], [60, 40]]),
    ("Qwen3VLForConditionalGeneration", "No cup {here}, [1, 2] and <point>.", []),
]


@pytest.mark.parametrize(("architecture", "text", "expected"), FORMS)
def test_boxes_in_pixels_of_the_image(page, architecture, text, expected):
    script = """async ([text, name]) => {
        const { findBoxes } = await import("/page/boxes.js");
        return findBoxes(text, { width: 200, height: 100, resized: [100, 50] }, name).map((one) => one.box ?? one.point);
    }"""
    found = page.evaluate(script, [text, architecture])
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=0.1)


def test_boxes_are_drawn_and_history_is_kept(page):
    answer_with(page, BOXES)
    page.get_by_text("Find", exact=True).click()
    add(page, "line1.png")
    page.locator("#text").fill("the cup")
    page.keyboard.press("Enter")
    page.locator("rect.box").wait_for()
    assert page.locator(".box").count() == 2
    assert page.locator(".box-label").first.text_content() == "<i>cup</i>"
    wait_until(lambda: page.evaluate("import('/page/history.js').then(({ all }) => all()).then((kept) => kept.length)"))
    page.reload()
    page.locator("#model", has_text="tiny-vl").wait_for()
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="the cup", exact=True).click()
    page.locator("rect.box").wait_for()
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Delete the cup").click()
    page.get_by_text("Nothing yet.").wait_for()
    assert page.locator(".entry").count() == 0


def test_a_conversation_goes_on(page):
    answer_with(page, "Forty-two.")
    asked = []
    page.on("request", lambda one: one.url.endswith("/completions") and asked.append(one.post_data_json["messages"]))
    for index, text in enumerate(("One?", "Two?")):
        page.locator("#text").fill(text)
        page.keyboard.press("Enter")
        page.locator(".meta dl").nth(index).wait_for()
    assert [[message["role"] for message in messages] for messages in asked] == [["user"], ["user", "assistant", "user"]]


def test_narrow_dark_and_by_keyboard(open_page, tiny):
    page = open_page(tiny[0], viewport={"width": 320, "height": 560}, color_scheme="dark")
    page.locator("#model", has_text="tiny-vl").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Light").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.value"))
        assert page.evaluate("document.activeElement === document.body || document.activeElement.matches(':focus-visible')")
    assert {"ask", "text", "add", "send", "new", "open-history", "open-settings", "open-key"} <= set(seen)
    nameless = """() => [...document.querySelectorAll("button, input, textarea")].filter((one) => one.offsetParent
        && !one.ariaHidden && !one.textContent.trim() && !one.ariaLabel && !one.labels?.length).map((one) => one.outerHTML)"""
    assert page.evaluate(nameless) == []


@pytest.fixture(scope="module")
def speech(tiny_asr):
    return tiny_asr[0]


def test_words_light_up_as_the_audio_plays(open_page, speech):
    page = open_page(speech)
    page.locator("#model", has_text="tiny-asr").wait_for()
    assert page.locator("#tasks label").all_inner_texts() == ["Transcribe"]
    page.set_input_files("#choose", TINY.parent / "speech" / "alarm.flac")
    page.get_by_role("button", name="Send").click()
    page.locator(".word").first.wait_for()
    assert answer(page).strip() == "Set an alarm for seven forty five in the morning."
    page.locator(".word", has_text="seven").click()
    page.locator(".word.now", has_text="seven").wait_for()


def test_a_file_that_is_cut_off_has_its_text_and_the_error(open_page, speech, tmp_path):
    page = open_page(speech)
    page.locator("#model", has_text="tiny-asr").wait_for()
    soundfile.write(tmp_path / "a.wav", *soundfile.read(TINY.parent / "speech" / "alarm.flac"))
    whole = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(whole[: len(whole) * 3 // 5])
    page.set_input_files("#choose", tmp_path / "a.wav")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("it is cut off").first.wait_for()
    assert answer(page).startswith("Set an alarm")


@pytest.mark.parametrize("realtime", [False, True])
def test_live_audio(chromium, open_page, speech, tmp_path, realtime):
    served = httpx.get(f"{speech}/v1/models").json()
    assert served["data"][0]["capabilities"]["realtime"]
    served["data"][0]["capabilities"]["realtime"] = realtime
    samples, rate = soundfile.read(TINY.parent / "speech" / "alarm.flac")
    soundfile.write(tmp_path / "speech.wav", samples, rate, subtype="PCM_16")
    fake = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    browser = chromium(*fake, f"--use-file-for-fake-audio-capture={tmp_path / 'speech.wav'}")
    page = open_page(speech, browser, permissions=["microphone"])
    page.route("**/v1/models", lambda route: route.fulfill(json=served))
    page.reload()
    page.locator("#model", has_text="tiny-asr").wait_for()
    sockets = []
    page.on("websocket", lambda socket: sockets.append(socket.url))
    page.get_by_role("button", name="Speak").click()
    page.get_by_role("button", name="End recording").wait_for()
    assert page.locator("#send, #stop, #end").evaluate_all("(all) => all.filter((one) => !one.hidden).map(({ id }) => id)") == [
        "end"
    ]
    assert page.locator("#recording .dot").evaluate("(one) => getComputedStyle(one).backgroundColor") == "rgb(213, 52, 43)"
    page.evaluate("""() => new Promise((resolve) => {
        const timer = setInterval(() => document.getElementById("level").value > 0.3 && resolve(clearInterval(timer)), 10);
    })""")
    page.locator("#recorded", has_text="0:01").wait_for()
    page.wait_for_timeout(1000 * len(samples) / rate)  # the browser plays the file once
    page.get_by_role("button", name="End recording").click()
    page.locator(".word").first.wait_for()
    assert len(answer(page).split()) > 2
    page.wait_for_function("document.querySelector('.entry audio').duration > 1")
    assert len(sockets) == realtime


def test_the_start_says_what_the_model_takes_and_has_samples(page):
    assert page.locator("#takes").inner_text() == "tiny-vl takes text, images and videos."
    assert page.locator("#facts dt").all_inner_texts()[:3] == ["architecture", "context", "takes"]
    assert page.locator("#facts dd").nth(1).inner_text() == "1024 tokens"
    assert page.locator("#samples button").all_inner_texts() == ["Read a receipt", "Read a word", "Describe a picture"]
    page.get_by_role("button", name="Read a receipt").click()
    page.locator(".meta dl").wait_for()
    assert answer(page) == "ICG4 114\nCOFFEE 29.93\nTOTAL 17.04"
    assert page.locator("#hint").is_hidden()


def test_samples_of_speech(open_page, speech):
    page = open_page(speech)
    page.get_by_role("button", name="A command").click()
    page.locator(".word").first.wait_for()
    assert answer(page).strip() == "Turn on the kitchen light."


MARKDOWN = """# Result

A **bold** word, *one* in italics, `code_of_it`, 2 * 3 * 4 and snake_case_name.
Second line, <b>no tag</b>, \\*no italics\\*.

- one
- two
  1. inner

> quoted

| left | right |
|------|------:|
| a `|` b | 1 |
| c | 2 |

```python
if a < b:  # **as it is**
    pass
```

[a page](https://example.org/x) and [a trap](javascript:alert(1)) and ![a picture](http://example.org/y.png)
"""


def test_markdown_is_a_safe_subset(page):
    answer_with(page, MARKDOWN)
    page.locator("#text").fill("Show me.")
    page.keyboard.press("Enter")
    page.locator(".meta dl").wait_for()
    shown = page.locator(".answer")
    assert shown.locator("h3").inner_text() == "Result"
    assert shown.locator("strong").inner_text() == "bold"
    assert shown.locator("em").all_inner_texts() == ["one"]
    assert shown.locator("p code").inner_text() == "code_of_it"
    assert "2 * 3 * 4 and snake_case_name.\nSecond line, <b>no tag</b>, *no italics*." in shown.inner_text()
    assert shown.locator("ul > li").all_inner_texts()[0] == "one"
    assert shown.locator("ul > li ol > li").inner_text() == "inner"
    assert shown.locator("blockquote").inner_text() == "quoted"
    assert shown.locator("th").all_inner_texts() == ["left", "right"]
    assert shown.locator("tbody tr").last.locator("td").all_inner_texts() == ["c", "2"]
    assert shown.locator("td").last.evaluate("(cell) => cell.style.textAlign") == "right"
    assert shown.locator("pre").inner_text() == "if a < b:  # **as it is**\n    pass"
    links = shown.locator("a")
    assert [link.get_attribute("href") for link in links.all()] == ["https://example.org/x", "http://example.org/y.png"]
    assert links.first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert "[a trap](javascript:alert(1))" in shown.inner_text()
    assert shown.locator("img, b, script").count() == 0


def test_an_answer_is_copied_asked_again_and_edited(chromium, open_page, tiny):
    page = open_page(tiny[0], permissions=["clipboard-read", "clipboard-write"])
    page.locator("#model", has_text="tiny-vl").wait_for()
    answer_with(page, "**Forty-two.**")
    asked = []
    page.on("request", lambda one: one.url.endswith("/completions") and asked.append(one.post_data_json["messages"]))
    for index, text in enumerate(("One?", "Two?")):
        page.locator("#text").fill(text)
        page.keyboard.press("Enter")
        page.locator(".meta dl").nth(index).wait_for()
    page.get_by_role("button", name="Copy").last.click()
    page.locator("#status", has_text="Copied").wait_for(state="attached")
    assert page.evaluate("navigator.clipboard.readText()") == "**Forty-two.**"
    page.get_by_role("button", name="Retry").last.click()
    page.locator(".meta dl").nth(1).wait_for()
    assert page.locator(".request").all_inner_texts() == ["AskOne?", "AskTwo?"]
    page.get_by_role("button", name="Edit").first.click()
    assert page.locator("#text").input_value() == "One?"
    assert page.locator("#editing").is_visible()
    page.locator("#text").fill("Three?")
    page.keyboard.press("Enter")
    page.locator(".request", has_text="Three?").wait_for()
    page.locator(".meta dl").wait_for()
    assert page.locator(".request").all_inner_texts() == ["AskThree?"]
    assert page.locator("#editing").is_hidden()
    assert [len(messages) for messages in asked] == [1, 3, 3, 1]


def test_settings_are_sent_and_kept(page):
    answer_with(page, "Yes.")
    bodies = []
    page.on("request", lambda one: one.url.endswith("/completions") and bodies.append(one.post_data_json))
    for reload in False, True:
        if reload:
            page.reload()
            page.locator("#model", has_text="tiny-vl").wait_for()
        else:
            page.get_by_role("button", name="Settings").click()
            page.get_by_label("System prompt").fill("Be brief.")
            page.get_by_label("Temperature").fill("0.5")
            page.get_by_label("Longest answer").fill("7")
            page.get_by_role("button", name="Save").click()
        page.locator("#text").fill("Well?")
        page.keyboard.press("Enter")
        page.locator(".meta dl").wait_for()
    page.get_by_role("button", name="Settings").click()
    assert page.locator("#model-facts dt").first.inner_text() == "architecture"
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("button", name="Save").click()
    page.locator("#text").fill("And now?")
    page.keyboard.press("Enter")
    page.locator(".meta dl").nth(1).wait_for()
    sent = [(body.get("temperature"), body.get("max_tokens"), body["messages"][0]["role"]) for body in bodies]
    assert sent == [(0.5, 7, "system"), (0.5, 7, "system"), (None, None, "user")]


def test_the_grid_of_rows_is_drawn_on_demand(page):
    page.get_by_role("button", name="Read a receipt").click()
    answer(page)
    page.get_by_label("grid of encoder rows").wait_for()
    assert not page.locator(".grid").is_visible()
    page.get_by_label("grid of encoder rows").check()
    assert page.locator(".grid").is_visible()


def test_a_legend_explains_the_times(page):
    page.get_by_role("button", name="Read a word").click()
    answer(page)
    page.get_by_text("What the times mean").click()
    names = [text.split(":")[0] for text in page.locator(".legend li").all_inner_texts()]
    assert "prefill" in names
    assert page.locator(".bar span").count() == len(names)
    color = "(one) => getComputedStyle(one).backgroundColor"
    colors = [[one.evaluate(color) for one in page.locator(f"{part}").all()] for part in (".bar span", ".legend .swatch")]
    assert colors[0] == colors[1]
    assert len(set(colors[0])) == len(names)


def test_errors_have_no_names_of_the_api(page):
    page.set_input_files("#choose", files=[{"name": "a.png", "mimeType": "image/png", "buffer": b"no image"}])
    page.locator("#text").fill("What is this?")
    page.get_by_role("button", name="Send").click()
    page.locator(".wrong", has_text="a.png: it is not").wait_for()
    assert "image 0" not in page.locator(".wrong").inner_text()


def test_a_narrow_page_has_its_buttons_in_one_row(open_page, tiny):
    page = open_page(tiny[0], viewport={"width": 390, "height": 800})
    page.locator("#model", has_text="tiny-vl").wait_for()
    for row in "nav button", "#composer .actions button:visible":
        tops = page.locator(row).evaluate_all("(all) => all.map((one) => Math.round(one.getBoundingClientRect().top))")
        assert len(tops) > 1
        assert max(tops) - min(tops) < 12, row
    assert page.locator("header").evaluate("(one) => one.offsetHeight") < 70
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for name in "New", "History", "Settings", "Key", "Add files", "Send":
        button = page.get_by_role("button", name=name, exact=True)
        assert button.locator("svg.icon use").get_attribute("href").startswith("#icon-")
        assert button.locator("span").is_visible()


def test_a_transcript_has_language_and_real_time_factor_and_a_player(open_page, speech):
    page = open_page(speech)
    page.get_by_role("button", name="An alarm").click()
    page.locator(".word").first.wait_for()
    answer(page)
    facts = dict(zip(page.locator(".meta dt").all_inner_texts(), page.locator(".meta dd").all_inner_texts(), strict=True))
    assert (facts["language"], facts["audio"]) == ("english", "3.3 s")
    assert float(facts["real-time factor"]) > 0
    player = page.locator(".entry .player")
    assert player.locator("audio[controls]").count() == 0
    assert player.locator(".time").inner_text() == "0:00 / 0:03"
    player.get_by_role("button", name="Play alarm.flac").click()
    player.get_by_role("button", name="Pause alarm.flac").click()
    player.get_by_role("slider").fill("2")
    assert page.evaluate("document.querySelector('.entry audio').currentTime") == pytest.approx(2, abs=0.1)
