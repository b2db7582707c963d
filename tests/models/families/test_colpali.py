"""ColModernVBERT in the layout of its publisher's merged checkpoint: other names, added tokens in a table of their own."""

import json
from pathlib import Path

import numpy as np
from embedder import load_embedders
from family import make_media, save
from safetensors.torch import load_file, save_file
from sensorium import LLM

ADDED, TABLE = 4, "model.text_model.embeddings.tok_embeddings."


def merged(name: str) -> str:
    name = name.replace("vlm.", "model.", 1).replace("embedding_proj_layer.", "custom_text_proj.")
    return name.replace("modality_projection.", "modality_projection.proj.")


def vectors(folder: Path) -> list[np.ndarray]:
    llm = LLM(folder, device="cpu", max_model_len=1024)
    image = {"prompt": "", "multi_modal_data": {"image": make_media("image", (90, 130), 0)}}
    return [np.asarray(one.vector) for one in llm.embed(["import os", image], use_tqdm=False)]


def test_the_publishers_merged_layout(tmp_path: Path) -> None:
    row = load_embedders()["colmodernvbert"]
    save(row, tmp_path)
    expected = vectors(tmp_path)
    tensors = {merged(name): one for name, one in load_file(tmp_path / "model.safetensors").items()}
    table = tensors[f"{TABLE}weight"]
    tensors |= {f"{TABLE}weight": table[:-ADDED].clone(), f"{TABLE}additional_embedding.weight": table[-ADDED:].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["vlm_config"]["additional_vocab_size"] = ADDED
    config["vlm_config"]["text_config"]["vocab_size"] -= ADDED
    config["embed_dim"] = config.pop("embedding_dim")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for before, after in zip(expected, vectors(tmp_path), strict=True):
        assert np.array_equal(before, after)
