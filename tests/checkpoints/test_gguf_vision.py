"""A GGUF model with an encoder gives the same answers as a checkpoint in the Hub's layout with the dequantised values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family import ask, save
from gguf_files import Kind, Q, add, everything, finish, write
from parity import ROWS, make_llm, record
from sensorium.callers.errors import ConfigError, SensoriumError
from sensorium.engine.setup.doctor import describe_checkpoint

TEXT = {"layer_types": ["sliding_attention"] * 3, "query_pre_attn_scalar": 16}
BUILDS: dict[str, dict[str, Any]] = {
    "llava": {}, "llava_next": {"text": "llama", "sliding_window": None},
    "qwen2_vl": {}, "qwen2_5_vl": {}, "gemma3": TEXT, "qwen3_vl": {}, "idefics3": {}, "smolvlm": {},
    "pixtral": {"sliding_window": None}, "mistral3": {"sliding_window": None, "act": "silu"},
}  # fmt: skip
CASES = {"qwen2_vl": "iv", "qwen2_5_vl": "iv", "qwen3_vl": "iv", "smolvlm": "v"}


def make(family: str, tmp_path: Path, types: Kind) -> tuple[Path, Path]:
    source = save(ROWS[family], tmp_path / "source", 0, **BUILDS[family])
    images = json.loads((source / "preprocessor_config.json").read_text())
    (source / "preprocessor_config.json").write_text(json.dumps(images | {"do_pan_and_scan": False}))
    return write(source, tmp_path / "gguf", types)


@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, Q.F16) for family in BUILDS), ("qwen2_5_vl", Q.Q8_0), ("gemma3", Q.Q8_0)],
    ids=lambda value: getattr(value, "name", value),
)
def test_answers_are_those_of_the_dequantised_checkpoint(family: str, kind: Any, tmp_path: Path) -> None:
    file, wide = make(family, tmp_path, everything(kind))
    question = ask(ROWS[family], CASES.get(family, "ii"), 0)
    (ours, logits), (theirs, expected) = (
        record(make_llm(ROWS[family], path, dtype="float32"), question, 24) for path in (file, wide)
    )
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4 * float(expected.std()))


@pytest.mark.parametrize("variant", ["", "root mean square"])
def test_internvl(variant: str, tmp_path: Path) -> None:
    """Its config is that of the publisher's layout, where Pillow resizes images."""
    row = ROWS["internvl"]
    source = save(row, tmp_path / "source", 0, **(row.variants[variant] if variant else {}))
    images = json.loads((source / "preprocessor_config.json").read_text())
    images |= {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (source / "preprocessor_config.json").write_text(json.dumps(images))
    file, wide = write(source, tmp_path / "gguf", everything(Q.F16))
    question = ask(row, "ii", 0)
    ours, logits = record(make_llm(row, file, dtype="float32"), question, 8)
    pillow = {"image": {"resample": "pillow"}, "video": {}}
    theirs, expected = record(make_llm(row, wide, dtype="float32", mm_processor_kwargs=pillow["image"]), question, 8)
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4 * float(expected.std()))


def edit(file: Path, **changes: Any) -> None:
    """Rewrite a GGUF file with other metadata (None removes a key); a function `tensors` may change its tensors."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(f"{file}.new", reader.fields["general.architecture"].contents())
    change = changes.pop("tensors", lambda name, data: [(name, data)])
    found = {key: one.contents() for key, one in reader.fields.items() if not key.startswith(("GGUF.", "general.arch"))}
    for key, value in (found | changes).items():
        add(writer, key, value)
    for tensor in reader.tensors:
        for name, data in change(tensor.name, tensor.data):
            kind = tensor.tensor_type
            writer.add_tensor(name, data.copy(), raw_dtype=None if kind in (Q.F16, Q.F32) else kind)
    finish(writer)
    Path(f"{file}.new").replace(file)


def answer(family: str, path: Path) -> Any:
    return record(make_llm(ROWS[family], path, dtype="float32"), ask(ROWS[family], CASES.get(family, "ii"), 0), 8)[1]


def swapped(name: str, data: Any) -> list[tuple[str, Any]]:
    """Swap the names of the MLP's layers, as in files from before 2025."""
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return [(re.sub("ffn_up|ffn_down", lambda match: other[match[0]], name), data)]


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_older_names_of_the_mlp(family: str, tmp_path: Path) -> None:
    file, _ = make(family, tmp_path, everything(Q.F16))
    expected = answer(family, file)
    edit(file.with_name("mmproj.gguf"), tensors=swapped)
    torch.testing.assert_close(answer(family, file), expected)


@pytest.mark.parametrize(("family", "token"), [("gemma3", "<image_soft_token>"), ("llava", "<image>")])
def test_a_vocabulary_without_the_placeholder_of_images(family: str, token: str, tmp_path: Path) -> None:
    """Vocabularies of Gemma 3's files lack <image_soft_token>, which only marks encoder rows; those of LLaVA lack <image>."""
    file, _ = make(family, tmp_path, everything(Q.F16))
    expected, vocabulary = answer(family, file), gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    place = vocabulary.index(token)
    fields = gguf.GGUFReader(file).fields

    def without(values: Any) -> Any:
        return [*values[:place], *values[place + 1 :]]

    def shorter(name: str, data: Any) -> list[tuple[str, Any]]:
        return [(name, np.delete(data, place, 0) if name in ("token_embd.weight", "output.weight") else data)]

    lists = {key: without(fields[key].contents()) for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")}
    ids = {
        key: int(fields[key].contents()) - (int(fields[key].contents()) > place)
        for key in (f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "padding"))
        if key in fields
    }
    edit(file, tensors=shorter, **lists, **ids)
    logits = answer(family, file)
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits[:, :place], expected[:, :place])


def test_encoders_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file, _ = make("qwen2_5_vl", tmp_path, everything(Q.F16))
    encoder = file.with_name("mmproj.gguf")
    for match, changes in {
        "mmproj.gguf has the projector 'resampler'; supported are gemma3": {"clip.projector_type": "resampler"},
        "makes rows of width 64 for gemma3, and model.gguf is qwen2vl of width 64": {"clip.projector_type": "gemma3"},
        "makes rows of width 32 for qwen2vl": {"clip.projector_type": "qwen2vl_merger", "clip.vision.projection_dim": 32},
        "lacks 'num_hidden_layers'": {"clip.vision.projection_dim": 64, "clip.vision.block_count": None},
    }.items():
        edit(encoder, **changes)
        with pytest.raises(ConfigError, match=match):
            make_llm(ROWS["qwen2_5_vl"], file)
    encoder.unlink()
    text = make_llm(ROWS["qwen2_5_vl"], file)  # without its encoder it is a text model
    assert text.generate("def f(x):", use_tqdm=False)[0].error is None


def test_false_metadata_raise_typed_errors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # tokenizers that are converted here
    file, _ = make("idefics3", tmp_path, everything(Q.F16))
    refused = 0
    for path in (file, file.with_name("mmproj.gguf")):
        whole, fields = path.read_bytes(), gguf.GGUFReader(path).fields
        for key in fields:
            if key.startswith(("GGUF.", "general.arch", "tokenizer.ggml.merges")):
                continue
            for value in (None, 0, [1, 2], True):
                edit(path, **{key: value})
                try:
                    describe_checkpoint(file)
                except SensoriumError:
                    refused += 1
                path.write_bytes(whole)
    assert refused > 80
