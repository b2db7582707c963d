"""MultiModalProcessor: parallel downloads, order of items, and processed items that threads share."""

from __future__ import annotations

import gc
import io
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from clips import clip
from infos import INFOS
from PIL import Image
from sensorium import LLM
from sensorium.callers.errors import InputError, MediaError
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalProcessor, MultiModalSettings
from sensorium.mm.media import gate, isolate
from sensorium.mm.media.isolate import Interrupt
from sensorium.mm.media.policy import MediaPolicy, MediaUrl, PdfPage
from sensorium.mm.parse import MediaSource
from sensorium.mm.tenants import tenant_salt
from sensorium.mm.types import Media, MediaHeader
from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo
from sensorium.processors.files import ProcessorFiles
from waiting import LONG, wait_until

LOCAL = MediaPolicy(allow_private_hosts=True, allowed_media_ports=None, timeout=60.0, max_seconds=60.0)


def png(width: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((60, width, 3), width, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def server():
    """A server that answers /N with an image N pixels wide once three requests are open at the same time, and /0 with 404."""
    together = threading.Barrier(3, timeout=LONG)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            together.wait()
            width = int(self.path[1:])
            body = png(width) if width else b"no"
            self.send_response(200 if width else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}"
    running.shutdown()
    running.server_close()
    thread.join()


def media(policy: MediaPolicy = LOCAL, **settings: object) -> MultiModalProcessor:
    return MultiModalProcessor(Qwen2VLProcessingInfo(ProcessorFiles()), MultiModalSettings(policy, **settings))


def test_downloads_run_together_and_keep_their_order(server):
    urls = [MediaUrl(f"{server}/{width}") for width in (90, 60, 120)]
    items = media().open({"image": [*urls[:1], png(75), *urls[1:]]}, {}, {}, None)
    assert [item.plan.size for item in items] == [(60, 90), (60, 75), (60, 60), (60, 120)]


def test_salts_of_one_tenant_share_workers_and_budget_but_no_items(monkeypatch):
    processor, tenants, keys = media(), [], set()
    for module, name in ((gate, "probe"), (gate, "decode"), (processor.budget, "open")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real: tenants.append(args[-1]) or real(*args))
    for name in "xy":
        salt = tenant_salt("a", name)
        (item,) = processor.open({"image": [png(60)]}, {}, {}, salt)
        processor.process(item, salt, {})
        keys.add(item.key)
    assert tenants == ["a"] * 6
    assert len(keys) == 2


@pytest.mark.parametrize("body", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na"], ids=["silent", "slow"])
def test_an_interrupt_ends_a_running_download(body):
    """Its thread goes on at once: it does not wait for the server's next byte, or for the time limit."""
    policy = replace(LOCAL, timeout=LONG, max_seconds=LONG)
    processor, interrupt = media(policy), Interrupt()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        url = MediaUrl(f"http://127.0.0.1:{server.getsockname()[1]}/a")
        found = pool.submit(interrupt.run, lambda: processor.open({"image": [url]}, {}, {}, None))
        connection = server.accept()[0]
        with connection:
            connection.recv(1 << 16)
            connection.sendall(body)
            interrupt.stop()
            with pytest.raises(MediaError):
                found.result(LONG / 4)


def test_one_failing_download_is_named_and_leaves_none_behind(server):
    processor = media()
    with pytest.raises(MediaError, match=r"image 1: 127\.0\.0\.1 answers with status 404"):
        processor.open({"image": [f"{server}/90", f"{server}/0", f"{server}/60"]}, {}, {}, None)
    assert processor._fetchers._work_queue.qsize() == 0


def test_threads_share_one_decoding(monkeypatch):
    processor, calls, decode = media(), [], gate.decode

    def counted(*args: object):
        calls.append(1)
        return decode(*args)

    monkeypatch.setattr(gate, "decode", counted)
    found = []

    def work() -> None:
        (item,) = processor.open({"image": png(200)}, {}, {}, None)
        found.append(processor.process(item, None, {}))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert all(one is found[0] for one in found)
    (item,) = processor.open({"image": png(200)}, {}, {}, None)
    assert item.processed is found[0]
    (elsewhere,) = processor.open({"image": png(200)}, {}, {}, "tenant")
    assert elsewhere.processed is None


def test_the_same_uuid_with_other_frames_is_another_item():
    processor, frames = media(), np.zeros((8, 60, 60, 3), np.uint8)
    keys = set()
    for count in (2, 4, 8):
        (item,) = processor.open({"video": Media(frames, uuid="clip", num_frames=count)}, {}, {}, None)
        processor.process(item, None, {})
        keys.add(item.key)
    assert len(keys) == 3
    (kept,) = processor.open({"video": Media(None, uuid="clip", num_frames=4)}, {}, {}, None)
    assert len(kept.plan.frames.indices) == 4
    with pytest.raises(MediaError, match="Cache miss for video at index 0"):
        processor.open({"video": Media(None, uuid="clip", num_frames=6)}, {}, {}, None)


def test_items_are_processed_in_the_encoders_type():
    processor = media(dtype=torch.bfloat16)
    (item,) = processor.open({"image": png(90)}, {}, {}, None)
    ((kwargs, _),) = processor.process(item, None, {}).pieces
    assert kwargs["pixel_values"].data.dtype == torch.bfloat16


def test_options_that_cannot_be_hashed_or_copied_are_refused():
    for value in (object(), memoryview(b"x")):
        with pytest.raises(InputError, match="mm_processor_kwargs: "):
            media().open({}, {}, {"size": value}, None)


def test_a_video_with_its_own_fps_shrinks():
    processor = media()
    (item,) = processor.open({"video": Media(clip("h264-mp4"), fps=10.0, min_pixels=560 * 560)}, {}, {}, None)
    (small,) = processor.shrink([item], 100, None)
    assert item.plan.num_tokens == small.plan.shrunk_from == 8000
    assert small.plan.num_tokens <= 100


def test_items_without_exact_headers_are_limited_after_decoding(monkeypatch):
    processor = media(max_rows=100)
    options = {"num_frames": 8, "min_pixels": 560 * 560}
    (item,) = processor.open({"video": Media(clip("h264-raw"), **options)}, {}, {}, None)
    assert not item.plan.exact
    monkeypatch.setattr(Qwen2VLProcessingInfo, "process", None)
    with pytest.raises(MediaError, match="video 0: it makes 1600 rows, but max_model_len is 100"):
        processor.process(item, None, {})


def test_an_error_names_the_item_as_each_request_counts_it(monkeypatch):
    processor, begun, release = media(), threading.Event(), threading.Event()
    broken = png(200)[:-30]

    def decode(source: MediaSource, *_: object):
        begun.set()
        release.wait(LONG)
        raise MediaError("image", source.index, "it is broken")

    monkeypatch.setattr(gate, "decode", decode)
    first, second = ({"image": broken}, {"image": [png(90), broken]})
    items = [processor.open(data, {}, {}, None)[-1] for data in (first, second)]
    said = []

    def work(item: object) -> None:
        with pytest.raises(MediaError) as error:
            processor.process(item, None, {})
        said.append(str(error.value))

    threads = [threading.Thread(target=work, args=(item,)) for item in items]
    threads[0].start()
    begun.wait(LONG)
    threads[1].start()
    release.set()
    for thread in threads:
        thread.join()
    assert sorted(said) == ["image 0: it is broken", "image 1: it is broken"]


def test_options_that_the_caller_changes_later_are_remembered_as_they_were():
    processor, nested = media(), {"max_pixels": 28 * 28 * 4}
    options = {"images_kwargs": nested}
    (before,) = processor.open({"image": png(250)}, {}, options, None)
    nested["max_pixels"] = 28 * 28 * 100
    again = {"images_kwargs": {"max_pixels": 28 * 28 * 4}}
    (after,) = processor.open({"image": Media(png(250), min_pixels=1)}, {}, again, None)
    assert after.plan.num_tokens == before.plan.num_tokens


@pytest.fixture
def no_workers(monkeypatch):
    """Start without workers and without engines of other tests that keep them."""
    gc.collect()
    isolate.close_workers()
    monkeypatch.setattr(isolate, "_owners", 0)


@pytest.mark.full
def test_codec_workers_end_with_the_last_that_uses_them(no_workers):
    model, picture = (Path(__file__).parents[3] / "assets" / name for name in ("tiny-vl", "media/line1.png"))
    for _ in range(2):
        with LLM(model, max_model_len=256, media={"decode_isolation": "process"}) as llm:
            assert llm.ocr(picture, max_tokens=1)[0].error is None
            assert isolate._idle
        assert not isolate._idle


@pytest.fixture
def counting():
    """A server that answers /slow once `gate` is set. `open` counts requests that wait for it; `seen` lists all requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server = self.server
            with server.lock:
                server.seen.append(self.path)
                server.open += self.path.startswith("/slow")
                server.most = max(server.most, server.open)
            if self.path.startswith("/slow"):
                server.gate.wait(LONG)
                with server.lock:  # before the client can send its next request
                    server.open -= 1
            body = png(60)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads, running.block_on_close = True, False
    running.seen, running.open, running.most, running.gate, running.lock = [], 0, 0, threading.Event(), threading.Lock()
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.gate.set()
    running.shutdown()
    running.server_close()


def test_equal_urls_of_a_request_are_downloaded_once(counting):
    processor, url = media(), f"http://127.0.0.1:{counting.server_port}/a"
    items = processor.open({"image": [url] * 20 + [MediaUrl(url)]}, {}, {}, None)
    assert len(items) == 21
    assert counting.seen == ["/a"]
    assert len({id(item.source.data) for item in items}) == 1
    assert processor.budget.num_bytes == 0


def test_a_file_is_downloaded_once_for_all_its_pages(counting, monkeypatch):
    monkeypatch.setattr(gate, "probe", lambda *_: [MediaHeader("image", 60, 60)])
    processor, url = media(), f"http://127.0.0.1:{counting.server_port}/a"
    items = processor.open({"image": [PdfPage(url, 1), PdfPage(url, 2), PdfPage(MediaUrl(url), 3), url]}, {}, {}, None)
    assert counting.seen == ["/a"]
    assert [item.source.data for item in items] == [*(PdfPage(png(60), number) for number in (1, 2, 3)), png(60)]


def test_slow_urls_of_a_request_leave_threads_to_others(counting):
    processor, base = media(), f"http://127.0.0.1:{counting.server_port}"
    done = []
    greedy = [
        threading.Thread(
            target=lambda r=r: done.append(processor.open({"image": [f"{base}/slow{r}-{i}" for i in range(16)]}, {}, {}, None))
        )
        for r in range(4)
    ]
    for thread in greedy:
        thread.start()
    wait_until(lambda: counting.open == 4 * 6)
    assert len(processor.open({"image": [f"{base}/quick"]}, {}, {}, None)) == 1
    assert not done
    counting.gate.set()
    for thread in greedy:
        thread.join(LONG)
    assert [len(items) for items in done] == [16] * 4
    assert counting.most == 4 * 6


def test_a_request_over_the_byte_limit_is_refused_while_it_is_fetched(counting):
    size = len(png(60))
    processor = media(MediaPolicy(allow_private_hosts=True, allowed_media_ports=None, max_request_bytes=3 * size))
    urls = [f"http://127.0.0.1:{counting.server_port}/{i}" for i in range(4)]
    with pytest.raises(MediaError, match="media: max_request_bytes"):
        processor.open({"image": urls}, {}, {}, None)
    assert len(processor.open({"image": urls[:3]}, {}, {}, None)) == 3
    assert processor.budget.num_bytes == 0


def test_equal_items_of_a_prompt_are_processed_once_even_beyond_the_cache(monkeypatch):
    info, calls = Qwen2VLProcessingInfo(ProcessorFiles()), []
    processor = InputProcessor(info, None, MultiModalSettings(cache_bytes=1), max_model_len=4096)
    monkeypatch.setattr(processor.media, "_process", lambda *given: calls.append(1) or process(*given))
    process = MultiModalProcessor._process.__get__(processor.media)
    ids = [token for _ in range(5) for token in (info.placeholder_ids["image"], 5)]
    done = processor.process({"prompt_token_ids": ids, "multi_modal_data": {"image": [png(60)] * 5}})
    assert len(done.features) == 5
    assert len(calls) == 1
    assert processor.media.budget.num_bytes == 0


def test_modules_of_the_first_item_are_imported_before_it(tmp_path):
    (tmp_path / "a.png").write_bytes(png(60))
    (tmp_path / "a.mp4").write_bytes(clip("h264-mp4"))
    code = (
        "import sys; from pathlib import Path\n"
        "from sensorium.engine.frontend.media import MultiModalProcessor, MultiModalSettings\n"
        "from sensorium.models.families.qwen2_vl.processing import Qwen2VLProcessingInfo\n"
        "from sensorium.processors.files import ProcessorFiles\n"
        "processor = MultiModalProcessor(Qwen2VLProcessingInfo(ProcessorFiles()), MultiModalSettings())\n"
        "processor.warm_up(('image', 'video')).join(); known = set(sys.modules)\n"
        "for data in ({'image': Path('a.png')}, {'video': Path('a.mp4')}):\n"
        "    (item,) = processor.open(data, {}, {}, None); processor.process(item, None, {})\n"
        "assert not set(sys.modules) - known, set(sys.modules) - known\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("name", ["Qwen2VLProcessingInfo", "WhisperProcessingInfo", "KimiK25ProcessingInfo"])
def test_a_small_item_is_processed_at_start(name, isolation, monkeypatch, caplog, no_workers):
    processor, done = MultiModalProcessor(INFOS[name], MultiModalSettings(MediaPolicy(decode_isolation=isolation))), []
    process = processor._process
    monkeypatch.setattr(processor, "_process", lambda item, *rest: done.append((item.source.modality, process(item, *rest))))
    with caplog.at_level("DEBUG"):
        processor.warm_up(INFOS[name].modalities).join()
    assert [modality for modality, item in done if item.pieces] == list(INFOS[name].modalities)
    assert not isolate._idle
    assert processor.stats.entries == processor.stats.misses == 0


def test_a_config_without_a_hidden_size_takes_embeddings_of_the_models_width() -> None:
    media = MultiModalProcessor(Qwen2VLProcessingInfo(ProcessorFiles()), MultiModalSettings(row_bytes=16, dtype=torch.bfloat16))
    items = {"image_embeds": torch.ones(6, 8), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    (source,) = media.parse({"image": items}, {}, {})
    assert source.modality == "image"
    with pytest.raises(MediaError, match="8"):
        media.parse({"image": items | {"image_embeds": torch.ones(6, 9)}}, {}, {})
    media.close()
