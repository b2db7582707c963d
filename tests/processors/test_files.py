"""Templates and preprocessors are found wherever a checkpoint keeps them."""

from __future__ import annotations

import json
import os

import pytest
from sensorium.callers.errors import CheckpointError, InputError
from sensorium.checkpoints.files import read_json
from sensorium.processors.files import ProcessorFiles, find_template, read_preprocessors, read_template


def test_template_places(tmp_path):
    assert find_template(tmp_path) is None
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert find_template(tmp_path) == "d"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "j"}))
    assert find_template(tmp_path) == "j"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"chat_template\.json is not valid JSON"):
        find_template(tmp_path)


def test_preprocessor_places(tmp_path):
    assert read_preprocessors(tmp_path) == ProcessorFiles(folder=tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"a": 1}')
    assert read_preprocessors(tmp_path) == ProcessorFiles(image={"a": 1}, folder=tmp_path)
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"a": 2}, "video_processor": {"b": 3}}')
    assert read_preprocessors(tmp_path) == ProcessorFiles(image={"a": 2}, video={"b": 3}, folder=tmp_path)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "config.json").write_text('{"c": 4}')
    (tmp_path / "preprocessor_config.json").write_text('{"feature_extractor_type": "WhisperFeatureExtractor"}')
    files = read_preprocessors(tmp_path)
    assert (files.config, files.image) == ({"c": 4}, {})
    assert files.audio["feature_extractor_type"] == "WhisperFeatureExtractor"


def test_an_old_image_processor_is_called_a_feature_extractor(tmp_path):
    """The keys of openai/clip-vit-base-patch32."""
    clip = {"do_center_crop": True, "do_resize": True, "feature_extractor_type": "CLIPFeatureExtractor", "size": 224}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(clip))
    assert read_preprocessors(tmp_path) == ProcessorFiles(image=clip, folder=tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]", b'{"a":' * 100_000])
def test_a_file_without_a_json_object_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json is not") as error:
        read_json(tmp_path / "config.json")
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "generation_config.json"])
def test_a_pipe_in_place_of_a_file_is_refused_without_waiting(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} is not a regular file; replace it by the file itself"):
        read_preprocessors(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json", "tekken.json"])
def test_a_pipe_in_place_of_a_template_is_refused_without_waiting(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        find_template(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": [1]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": [], "template": ""}]}'),
    ],
)
def test_a_template_that_is_no_text_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the chat template of .* cannot be read"):
        find_template(tmp_path)


def test_a_chat_template_is_source_or_the_path_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages }}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (path, str(path), "~/own.jinja", "{{ messages }}"):
        assert read_template(given) == "{{ messages }}"
    assert read_template("two\nlines") == "two\nlines"
    for given in ("none.jinja", tmp_path, "x" * 5000, "a\0b"):
        with pytest.raises(InputError, match=r"^chat_template=.* cannot be read .*; give Jinja source, or the path") as error:
            read_template(given)
        assert len(str(error.value)) < 400
