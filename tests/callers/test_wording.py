"""Messages as templates: names in <<...>>, and the words of Python, of the server and of the command line."""

from __future__ import annotations

import ast
import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest
from sensorium.callers import wording
from sensorium.callers.errors import InputError, media_error, naming_param
from sensorium.callers.wording import ADVICE, advice_in, worded
from sensorium.cli import wording as cli
from sensorium.engine.engine_args import EngineArgs
from sensorium.server import wording as server

PACKAGE = Path(wording.__file__).parents[1]
FOLDERS = ("callers", "cli", "engine", "mm", "models", "pipelines", "processors", "server")
ARGS = Namespace(command="chat", dtype="auto", device="auto", max_model_len=None, max_tokens=8)
READ = {"fit_calibration", "max_pages", "output_dir", "pages", "resume"}
ARGUMENTS = {
    "aligner",
    "draw",
    "grammar_seconds",
    "max_tokens",
    "models",
    "multi_modal_data",
    "param",
    "timestamps",
    "tls_key",
    *READ,
}
"""Names in texts that are neither advice nor options of an engine. `READ`: of reading documents."""


def names_in_code() -> dict[str, str]:
    """Return the names in the texts of the package, each with a file that has it."""
    found: dict[str, str] = {}
    for path in (path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                found |= dict.fromkeys((match[1] for match in wording._NAME.finditer(node.value)), str(path))
    return found


def test_every_name_in_a_text_is_known() -> None:
    known = {*ADVICE, *ARGUMENTS, *(field.name for field in fields(EngineArgs))}
    assert {name: path for name, path in names_in_code().items() if name not in known} == {}


def test_every_advice_is_given() -> None:
    assert ADVICE.keys() - names_in_code().keys() == set()


def test_the_interfaces_word_only_advice_that_exists() -> None:
    assert server._ADVICE.keys() - ADVICE.keys() == set()
    assert cli._ADVICE.keys() - ADVICE.keys() == set()


def test_the_server_names_nothing_of_python() -> None:
    python = re.compile(r"llm\.|LLM\(|np\.|Params\(|\bPath\b|\bbytes\b|chat_template=|wake_up|multi_modal_data|encode_media")
    assert {name: words for name in ADVICE if python.search(words := server._WORDS[name])} == {
        "base_with_adapter": ADVICE["base_with_adapter"]
    }


@pytest.mark.parametrize(
    ("text", "param", "said", "http", "flags"),
    [
        (
            "no template; <<give_template>>",
            None,
            "pass chat_template=",
            "start the server with --chat-template",
            "give --chat-template",
        ),
        ("it is a PDF; <<give_pdf>>", None, "give sensorium.pdf_pages(file) in Python", "give it in a part", "`sensorium ocr`"),
        ("<<convert_audio>>", None, "(np.frombuffer(data, np.int16), rate)", "convert it to WAV or FLAC", "--live -`"),
        (
            "<<param=>>'x' is bad; pass <<dtype=>> one of a",
            "dtype",
            "dtype='x' is bad; pass dtype= one",
            "pass dtype= one",
            "--dtype 'x' is bad; pass --dtype one",
        ),
        ("shorten it or raise <<max_model_len>>", None, "raise max_model_len", "raise max_model_len", "raise --max-model-len"),
        ("raise <<kv_cache_memory_bytes>> to 5", None, *("raise kv_cache_memory_bytes to 5",) * 3),
        (
            "/a/dtype=5/max_tokens.png, <<SYS>> << max_tokens >>",
            None,
            *("/a/dtype=5/max_tokens.png, <<SYS>> << max_tokens >>",) * 3,
        ),
        ("shorten it", None, "shorten it", "shorten it", "shorten it"),
    ],
)
def test_each_interface_words_a_text(text: str, param: str | None, said: str, http: str, flags: str) -> None:
    error = InputError(text, param=param)
    assert said in str(error) == error.info.message
    assert http in server.message_of(error.info)
    assert flags in cli.message_of(error.info, ARGS)
    for message in str(error), server.message_of(error.info), cli.message_of(error.info, ARGS):
        assert not wording._NAME.search(message)


def test_the_advice_is_data() -> None:
    assert InputError("no template; <<give_template>>").info.advice == "give_template"
    assert InputError("<<param>> is bad", param="seed").info.advice is None
    assert advice_in("raise <<max_model_len>> or <<check_url>>") == "check_url"
    assert media_error(InputError("x; <<check_url>>"), "image", 2).info.advice == "check_url"


def test_a_message_follows_its_parameter() -> None:
    with pytest.raises(InputError) as caught, naming_param("messages[0].content[1]", ("fps",)):
        raise InputError("<<param=>>-1 must be above 0", param="fps")
    assert str(caught.value) == "messages[0].content[1].fps=-1 must be above 0"
    assert worded("<<param>> is missing", {}) == "it is missing"
