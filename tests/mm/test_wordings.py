"""Advice in the words of the server and of the command line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sensorium.mm import wordings
from sensorium.mm.wordings import in_words_of

PACKAGE = Path(wordings.__file__).parents[1]
FOLDERS = ("engine", "mm", "models", "pipelines", "processors")


def texts() -> list[str]:
    """Return the texts in the package's code, without the table itself."""
    files = [file for folder in FOLDERS for file in (PACKAGE / folder).rglob("*.py") if file.name != "wordings.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_every_phrase_is_in_a_message() -> None:
    everything = "\n".join(texts())
    assert [phrase for phrase in wordings._PHRASES if phrase not in everything] == []


def test_no_phrase_hides_a_longer_one() -> None:
    phrases = list(wordings._PHRASES)
    assert not [(short, long) for i, short in enumerate(phrases) for long in phrases[i + 1 :] if short in long]


@pytest.mark.parametrize(
    ("said", "http", "cli"),
    [
        (
            "the checkpoint has no chat template; this model transcribes speech: call transcribe, or give a rendered prompt",
            "this model transcribes speech: send audio to /v1/audio/transcriptions",
            "this model transcribes speech: use `sensorium transcribe`",
        ),
        (
            "it is a PDF; give sensorium.pdf_pages(file) in Python, or the file in a part of type file",
            "give it in a part",
            "ocr`",
        ),
        (
            "convert it, or give raw PCM as (np.frombuffer(data, np.int16), rate)",
            "convert it",
            "`sensorium transcribe --live -`",
        ),
        ("shorten it", "shorten it", "shorten it"),
    ],
)
def test_advice_names_what_an_interface_has(said: str, http: str, cli: str) -> None:
    assert http in in_words_of("http", said)
    assert cli in in_words_of("cli", said)
    for words in in_words_of("http", said), in_words_of("cli", said):
        assert not [python for python in ("call transcribe", "pdf_pages", "np.") if python in words]
