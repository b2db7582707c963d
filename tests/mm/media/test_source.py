"""Reading bytes, paths and URLs; files that a message may name, and files that only the caller's own code may."""

from __future__ import annotations

import base64
import io
import os
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.media import data_url, fetch, gate
from sensorium.mm.media.ledger import MediaBudget
from sensorium.mm.media.policy import FrameFiles, MediaPolicy, MediaUrl
from sensorium.mm.media.source import read
from sensorium.mm.parse import MediaSource, trusted_source
from waiting import LONG

POLICY = MediaPolicy(max_bytes=1000)
DATA = "data:image/png;base64," + base64.b64encode(b"abcd").decode()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "root").mkdir()
    for name in ("root/a.bin", "root/a b%20.bin", "out.bin"):
        (tmp_path / name).write_bytes(b"abcd")
    (tmp_path / "root/link").symlink_to(tmp_path / "out.bin")
    (tmp_path / "root/inside").symlink_to(tmp_path / "root/a.bin")
    (tmp_path / "root/up").symlink_to(tmp_path)
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2/a.bin").write_bytes(b"abcd")
    return tmp_path


def test_every_form_gives_bytes(folder):
    path = folder / "out.bin"
    for value in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), DATA, MediaUrl(DATA), path, str(path), f"file://{path}"):
        assert read(value, "image", POLICY) == b"abcd"
    for value in (np.zeros((2, 2, 3), np.uint8), [1], (1, 2), None):
        assert read(value, "image", POLICY) is value


def test_urls_are_fetched(monkeypatch):
    monkeypatch.setattr(fetch, "fetch", lambda url, policy, ledger: url.encode())
    assert read("http://a.example/x", "image", POLICY) == b"http://a.example/x"
    assert read(MediaUrl("HTTPS://a.example/x"), "image", POLICY) == b"HTTPS://a.example/x"


@pytest.mark.parametrize("around", [" {}", "{} ", "\n\t{}\r\n", "\0 {}"])
def test_urls_lose_spaces_at_their_ends_and_paths_keep_them(folder, monkeypatch, around):
    monkeypatch.setattr(fetch, "fetch", lambda url, policy, ledger: url.encode())
    for url in ("http://h/a.png", "HTTPS://h/a b.png"):
        for value in (around.format(url), MediaUrl(around.format(url))):
            assert read(value, "image", MediaPolicy()) == url.encode()
            assert gate.is_remote(MediaSource("image", 0, value))
    assert read(around.format(f"file://{folder}/root/a.bin"), "image", MediaPolicy()) == b"abcd"
    assert read(around.format(DATA), "image", MediaPolicy()) == b"abcd"
    if "\0" not in around:
        (folder / around.format("padded")).write_bytes(b"padded")
        assert read(str(folder / around.format("padded")), "image", MediaPolicy()) == b"padded"


@pytest.mark.parametrize("make", [str, MediaUrl, Path, "file://{}".format], ids=["str", "url", "path", "file"])
@pytest.mark.parametrize("path", ["/x" * 5000, "/" + "y" * 300, "/" + "é" * 200, "/z\0", "/\udcff\ud800"], ids=range(5))
def test_paths_that_no_file_can_have(make, path):
    """Longer than PATH_MAX, a name longer than NAME_MAX in characters or in bytes, a null byte, a lone surrogate."""
    with pytest.raises(InputError) as caught:
        read(make(path), "image", MediaPolicy(allowed_local_media_path="/"))
    assert len(str(caught.value)) < 600


def test_messages_stay_under_the_root(folder):
    policy = MediaPolicy(allowed_local_media_path=str(folder / "root"))
    for text in ("a.bin", "inside", f"{folder}/root/a.bin", f"file://{folder}/root/a%20b%2520.bin", "x/../a.bin"):
        assert read(MediaUrl(text), "image", policy) == b"abcd"
    outside = (
        "link",
        "up/out.bin",
        "../out.bin",
        "../root2/a.bin",
        f"{folder}/out.bin",
        f"file://{folder}/root/%2e%2e/out.bin",
    )
    for text in outside:
        with pytest.raises(InputError, match="outside allowed_local_media_path"):
            read(MediaUrl(text), "image", policy)
    for text in ("none.bin", "a\0b", "\ud800", "."):
        with pytest.raises(InputError, match=r"cannot be read|is a folder"):
            read(MediaUrl(text), "image", policy)
    with pytest.raises(InputError, match="1,000,000 characters is over the limit of 4,096"):
        read(MediaUrl("a/" * 500_000), "image", policy)
    with pytest.raises(InputError, match="must not name a host"):
        read(MediaUrl("file://server/a.bin"), "image", policy)


def test_a_folder_that_becomes_a_link_after_the_check_is_not_followed(folder, monkeypatch):
    inside = folder / "root" / "inner"
    inside.mkdir()
    (inside / "a.bin").write_bytes(b"good")
    policy, real = MediaPolicy(allowed_local_media_path=str(folder / "root")), os.path.commonpath

    def exchange(paths):
        inside.rename(folder / "moved")
        inside.symlink_to(folder / "root2")
        return real(paths)

    assert read(MediaUrl("inner/a.bin"), "image", policy) == b"good"
    monkeypatch.setattr(os.path, "commonpath", exchange)  # the last step of the check
    with pytest.raises(InputError, match=r"'inner/a\.bin' cannot be read"):
        read(MediaUrl("inner/a.bin"), "image", policy)


@pytest.mark.parametrize("text", ["/etc/passwd", "file:///etc/passwd", "a.png", "file:a.png"])
def test_files_in_messages_are_refused_without_a_root(text):
    with pytest.raises(InputError, match=r"files named in messages are refused.*allowed_local_media_path"):
        read(MediaUrl(text), "image", POLICY)


@pytest.mark.parametrize("scheme", ["ftp", "s3", "gopher", "javascript", "a-long-name-of-a-scheme"])
def test_other_schemes_are_refused_by_name(scheme):
    with pytest.raises(InputError, match=f"{scheme}: URLs are not known"):
        read(MediaUrl(f"{scheme}://x"), "image", POLICY)
    with pytest.raises(InputError, match=f"{scheme}: URLs are not known"):
        read(f"{scheme}://x", "image", POLICY)


def test_a_root_may_be_a_link_itself(folder):
    (folder / "door").symlink_to("root")
    (folder / "root/loop").symlink_to("loop")
    policy = MediaPolicy(allowed_local_media_path=str(folder / "door"))
    for text in ("a.bin", f"{folder}/root/inside", f"file://{folder}/door/%61.bin"):
        assert read(MediaUrl(text), "image", policy) == b"abcd"
    for text in ("link", f"{folder}/root2/a.bin", f"file://{folder}/door/%2E%2E%2Fout.bin", "/etc/passwd"):
        with pytest.raises(InputError, match="outside allowed_local_media_path"):
            read(MediaUrl(text), "image", policy)
    for text in ("loop", "%2e%2e/out.bin", f"file://{folder}/door/a%00b"):
        with pytest.raises(InputError, match="cannot be read"):
            read(MediaUrl(text), "image", policy)


def test_invalid_urls():
    for value in ("file://[x/a.png", MediaUrl("file://[x/a.png")):
        with pytest.raises(InputError, match="is not a URL"):
            read(value, "image", MediaPolicy(allowed_local_media_path="/"))
    with pytest.raises(InputError, match="must be a string, not a PosixPath"):
        read(MediaUrl(Path("/etc/passwd")), "image", POLICY)


def test_pipes_devices_and_large_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(1001))
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(InputError, match="not a regular file"):
            read(path, "video", POLICY)
        assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir()), "it was left open"
    for value in (tmp_path / "large", bytes(1001), "data:;base64," + "A" * 1400):
        with pytest.raises(InputError, match=r"the limit is 1,000 \(media: max_bytes\)"):
            read(value, "video", POLICY)
    with pytest.raises(InputError, match="cannot be read \\(No such file"):
        read("/no/such/file", "video", POLICY)


@pytest.mark.parametrize("url", ["data:;base64,@@@", "data:;base64,\u00e4", "data:;base64,A", "data:", "data:image/png"])
def test_data_urls_that_are_refused(url):
    with pytest.raises(InputError, match=r"another form than data:|valid base64"):
        read(MediaUrl(url), "image", POLICY)


def test_a_long_data_url_is_read_in_pieces(monkeypatch):
    """One call over the whole text would hold the interpreter's lock, and so stop every stream."""
    lengths, decode = [], base64.b64decode
    monkeypatch.setattr(data_url.base64, "b64decode", lambda piece, **more: lengths.append(len(piece)) or decode(piece, **more))
    data = random.Random(0).randbytes(2_000_000)
    ledger = MediaBudget(MediaPolicy()).open()
    for size in (len(data), len(data) - 1, data_url.PIECE * 3 // 4, data_url.PIECE * 3 // 4 + 1):
        url = "data:image/png;base64," + base64.b64encode(data[:size]).decode()
        assert read(MediaUrl(url), "image", MediaPolicy(), ledger) == data[:size]
        read(MediaUrl("".join([url])), "image", MediaPolicy(), ledger)
    assert len(lengths) == 2 * 11 + 1 + 2, "equal URLs are decoded once"
    assert max(lengths) <= data_url.PIECE
    assert max(len(repr(key)) for key in ledger._read) < 200, "a long text as a key is hashed in one call"
    with pytest.raises(InputError, match="valid base64"):  # an end in the middle
        read(MediaUrl("data:;base64," + "A" * (data_url.PIECE - 4) + "QQ==QUFB"), "image", MediaPolicy())


def test_a_refusal_takes_no_memory(tmp_path):
    text = MediaUrl("data:;base64," + "A" * (300 << 20))
    (tmp_path / "small").write_bytes(b"abcd")
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="max_bytes"):
            read(text, "image", POLICY)
        read(tmp_path / "small", "image", MediaPolicy())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_sender_does_not_learn_where_the_root_is(folder):
    policy = MediaPolicy(allowed_local_media_path=str(folder / "root"))
    for text in ("no.bin", "", "a.bin/x"):
        with pytest.raises(InputError) as error:
            read(MediaUrl(text), "image", policy)
        assert str(folder) not in str(error.value)


def test_an_empty_root_is_not_the_current_folder():
    with pytest.raises(ConfigError, match="allowed_local_media_path is empty"):
        MediaPolicy(allowed_local_media_path="")


def test_data_urls_ignore_case():
    assert read(DATA.replace("data", "DATA").replace("base64", "BASE64"), "image", POLICY) == b"abcd"


def test_open_files_are_read_from_their_start(folder):
    buffer = io.BytesIO()
    buffer.write(b"abcd")  # as a caller leaves it that has just written it
    with (folder / "out.bin").open("rb") as file:
        file.seek(2)
        for value in (buffer, file, file):
            position = value.tell()
            assert read(value, "image", POLICY) == b"abcd"
            assert value.tell() == position
    with pytest.raises(InputError, match=r"the open file cannot be read \(.*closed file"):
        read(file, "image", POLICY)
    refusal = r"reading the open file gives a str; open it in binary mode, as in open\(path, 'rb'\)"
    with (folder / "out.bin").open() as text, pytest.raises(InputError, match=refusal):
        read(text, "image", POLICY)
    with pytest.raises(InputError, match="1,001 bytes, the limit is 1,000"):
        read(io.BytesIO(b"x" * 5000), "image", POLICY)
    with pytest.raises(InputError, match=r"the open file cannot be read \(integer division"):
        read(SimpleNamespace(read=lambda size: size // 0), "image", POLICY)


def test_an_open_file_that_blocks_holds_no_other_up_and_short_reads_are_continued():
    class Pipe(io.RawIOBase):
        def read(self, size=-1):
            begun.set()
            assert go_on.wait(LONG)
            return next(pieces)

    begun, go_on, pieces = threading.Event(), threading.Event(), iter([b"ab", b"c", b"d", b""])
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(read, Pipe(), "image", POLICY)
        assert begun.wait(LONG)
        other = pool.submit(read, io.BytesIO(b"xy"), "image", POLICY)
        try:
            assert other.result(LONG) == b"xy"
        finally:
            go_on.set()
        assert slow.result(LONG) == b"abcd"


def test_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"is a folder; give the files in it$"):
        read(tmp_path, "image", POLICY)


@pytest.mark.parametrize("value", ["", MediaUrl(""), trusted_source("")])
def test_an_empty_path_is_refused(value):
    with pytest.raises(InputError, match="the path is empty; give a file or URL"):
        read(value, "image", POLICY)


def test_bare_base64_is_explained():
    text = base64.b64encode(bytes(range(256))).decode()
    for value in (text, MediaUrl(text)):
        with pytest.raises(InputError, match=r"; if it is base64, write data:<type>;base64,<data>$"):
            read(value, "image", POLICY)


def test_a_pipe_is_read_to_its_end():
    reader, writer = os.pipe()
    os.write(writer, b"abcd")
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert read(pipe, "image", POLICY) == b"abcd"


def test_the_home_folder_is_expanded_in_the_callers_own_paths_only(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    for value in ("~/out.bin", Path("~/out.bin")):
        assert read(value, "image", POLICY) == b"abcd"
    with pytest.raises(InputError, match="files named in messages are refused"):
        read(MediaUrl("~/out.bin"), "image", POLICY)
    with pytest.raises(InputError, match="cannot be read"):
        read(MediaUrl("~/out.bin"), "image", MediaPolicy(allowed_local_media_path=str(folder)))


def test_frame_files_obey_the_rules_for_urls_and_paths(folder):
    policy = MediaPolicy(allowed_local_media_path=str(folder / "root"))
    files = FrameFiles((MediaUrl("a.bin"), folder / "out.bin"), 2.0)
    assert read(files, "video", policy) == ([b"abcd", b"abcd"], {"fps": 2.0, "do_sample_frames": False})
    for url in ("../out.bin", str(folder / "out.bin"), "link"):
        with pytest.raises(InputError, match="outside allowed_local_media_path"):
            read(FrameFiles((MediaUrl("a.bin"), MediaUrl(url)), 2.0), "video", policy)
    with pytest.raises(InputError, match="files named in messages are refused"):
        read(files, "video", POLICY)
