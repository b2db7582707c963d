"""data: URLs and base64 by the rules of the URL, Fetch and Infra Standards."""

from __future__ import annotations

import base64
import random
import textwrap

import pytest
from sensorium.callers.errors import InputError
from sensorium.mm.media import data_url
from sensorium.mm.media.data_url import base64_pieces, decoded, split_data_url, text_pieces
from sensorium.mm.media.policy import MediaPolicy, MediaUrl
from sensorium.mm.media.source import read
from sensorium.mm.parse import trusted_source

DATA = bytes(range(256)) * 3 + b"x"  # ends with "==" in base64
CODED = base64.b64encode(DATA).decode()
LINES = "\r\n".join(textwrap.wrap(CODED, 76))


def read_url(url: str, policy: MediaPolicy | None = None) -> object:
    return read(MediaUrl(url), "image", policy or MediaPolicy())


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{CODED}",
        f"data:image/png;base64,{LINES}\n",
        f"data:image/png;base64, {CODED[:50]} {CODED[50:]} ",
        f"data:image/png;base64,{CODED.rstrip('=')}",
        f"data:image/png;base64,{CODED.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        f"data:image/png;base64,{LINES}".replace("\r\n", "%0D%0A"),
        f"data:image/png;charset=utf-8;base64,{CODED}",
        f"data:image/png; base64,{CODED}",
        f"data:image/png;BASE64,{CODED}",
        f"DATA:IMAGE/PNG;base64,{CODED}",
        f"data:;base64,{CODED}",
        f"\n  data:image/png;base64,{CODED}",
        f"data:image/png;base64,{CODED}#a,b%20c",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in DATA),
        "data:image/png;charset=base64," + "".join(f"%{byte:02X}" for byte in DATA),
    ],
)
def test_every_way_to_write_the_same_data(url: str) -> None:
    assert read_url(url) == DATA
    assert read(trusted_source(url), "image", MediaPolicy()) == DATA


def test_data_that_are_not_base64() -> None:
    assert read_url("data:text/plain,a b+c%20d\u00e9%\t%4") == "a b+c d\u00e9%%4".encode()
    assert read_url("data:,") == b""
    assert read_url("data:text/plain,a#b") == b"a"


def test_a_length_that_is_no_multiple_of_a_piece_and_escapes_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(0)
    for size in range(4, 24, 4):
        monkeypatch.setattr(data_url, "PIECE", size)
        for length in range(40):
            data = generator.randbytes(length)
            coded = base64.b64encode(data).decode()
            plain = "".join(f"%{byte:02x}" for byte in data)
            escaped = "".join(f"%{ord(letter):02x}" if generator.random() < 0.5 else letter for letter in coded)
            for url in (f"data:,{plain}", f"data:;base64,{escaped}", f"data:;base64,{coded}", f"data:;base64, {escaped} "):
                assert read_url(url) == data
            assert b"".join(decoded(base64_pieces(text_pieces(coded)))) == data


@pytest.mark.parametrize("text", ["A", "QQ=", "QQ===", "Q===", "QQ==QQ==", "=", "QQ=A", "QUJD=", "QUI-", "QUI_", "Q\u00c4"])
def test_what_is_not_base64(text: str) -> None:
    with pytest.raises(InputError, match="valid base64"):
        read_url(f"data:;base64,{text}")
    with pytest.raises(ValueError):  # noqa: PT011  # UnicodeEncodeError and binascii.Error are its classes
        b"".join(decoded(base64_pieces(text_pieces(text))))


def test_the_limit_counts_bytes_of_the_file() -> None:
    exact = MediaPolicy(max_bytes=len(DATA))
    for url in (f"data:;base64,{LINES}", f"data:;base64,{CODED.replace('A', '%41')}"):
        assert read_url(url, exact) == DATA
    for url in (f"data:;base64,{LINES}AAAA", "data:," + "A" * (len(DATA) + 1), f"data:;base64,{CODED.rstrip('=')}AAAA"):
        with pytest.raises(InputError, match=r"the limit is 769 \(media: max_bytes\)"):
            read_url(url, exact)


def test_the_media_type_is_that_before_the_parameters() -> None:
    for url in ("data:Application/PDF;charset=x;base64,QQ", " data: application/pdf ;base64,QQ", "data:application/pdf,QQ"):
        parts = split_data_url(url)
        assert parts is not None
        assert parts.media_type == "application/pdf"
    assert split_data_url("data:application/pdf") is None
    assert split_data_url(f"data:{'a' * 2000},") is None
    assert split_data_url("https://a.example/x,y") is None
