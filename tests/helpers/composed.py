"""Oracles of audio families that are composed in a test: torch modules with a config.json, a tokenizer, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from oracle import ensure_torchvision
from safetensors.torch import load_file, save_file
from torch import nn


class ComposedModel(nn.Module):
    """An oracle with a decoder; a subclass defines `decoder` and `encode`, and its state has the published names.

    `encode(*item)` returns the rows `[rows, hidden]` of one item of `audio`, see `forward`. `unsaved`: prefixes of tensors that
    are not part of the checkpoint.
    """

    unsaved: tuple[str, ...] = ()
    decoder: Any
    encode: Callable[..., torch.Tensor]

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config

    def forward(self, input_ids: torch.Tensor, audio: Sequence[Any] = (), past_key_values: Any = None) -> Any:
        embeds = self.decoder.get_input_embeddings()(input_ids)
        if audio:
            embeds[input_ids == self.config["audio_token_id"]] = torch.cat([self.encode(*item) for item in audio])
        return self.decoder(inputs_embeds=embeds, past_key_values=past_key_values, use_cache=True)

    def save_pretrained(self, folder: Path, max_shard_size: object = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: value.contiguous() for name, value in self.state_dict().items() if not name.startswith(self.unsaved)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


class ComposedProcessor(SimpleNamespace):
    """`tokenizer`, `config`, and `preprocessor`, the content of preprocessor_config.json."""

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(self.preprocessor))


def load_composed(kind: type[ComposedModel], folder: Path) -> tuple[ComposedModel, ComposedProcessor]:
    """Return `Family.load` of an oracle."""
    ensure_torchvision()
    import transformers as tf

    model = kind(json.loads((folder / "config.json").read_text()))
    missing, surplus = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not surplus
    assert all(name.startswith(kind.unsaved) for name in missing), missing
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    words = tf.PreTrainedTokenizerFast.from_pretrained(folder)
    return model.eval(), ComposedProcessor(tokenizer=words, config=model.config, preprocessor=preprocessor)


def run_composed(model: ComposedModel, inputs: Mapping[str, Any], answer: Sequence[int], positions: object) -> torch.Tensor:
    """Implement `Family.run`."""
    with torch.inference_mode():
        first = model(**inputs)
        if len(answer) < 2:
            return first.logits[0].float()
        rest = model(torch.tensor([answer[:-1]]), past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], rest.logits[0]]).float()


def expand_audio(text: str, rows: Sequence[int], marks: tuple[str, str, str]) -> str:
    """Return a prompt with each placeholder repeated once per row. `marks`: placeholder, start and end.

    Start and end are added where both are absent.
    """
    placeholder, start, end = marks
    out, *others = text.split(placeholder)
    for count, part in zip(rows, others, strict=True):
        bare = not out.endswith(start) and not part.startswith(end)
        out += (start * bare) + placeholder * count + (end * bare) + part
    return out


def text_positions(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Implement `Family.oracle_positions` of models whose axes all count the tokens."""
    return torch.arange(inputs["input_ids"].shape[1]).expand(3, -1)
