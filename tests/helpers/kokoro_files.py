"""Small random checkpoints of Kokoro, with the published package's own code as oracle where it is installed."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PHONEMES = ';:,.!?—…"() ʣʥʦʨᵝAIOQSTWYᵊabcdefhijklmnopqrstuvwxyzɑɐɒæβɔɕçɖðʤəɚɛɜɟɡɪʝɯɰŋɳɲɴøɸθœɹɾɻʁʂʃʈʧʊʋʌɣɤχʎʒʔˈˌːʰʲ→↗↘ᵻ'
VOICES = ("af_ada", "bm_ben")
CONFIG: dict[str, Any] = {
    "istftnet": {
        "upsample_kernel_sizes": [20, 12], "upsample_rates": [10, 6], "gen_istft_hop_size": 5, "gen_istft_n_fft": 20,
        "resblock_dilation_sizes": [[1, 3, 5]], "resblock_kernel_sizes": [3], "upsample_initial_channel": 512,
    },
    "dim_in": 64, "dropout": 0.2, "hidden_dim": 512, "max_conv_dim": 512, "max_dur": 12, "multispeaker": True, "n_layer": 1,
    "n_mels": 80, "n_token": 178, "style_dim": 128, "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 64, "max_position_embeddings": 512,
        "num_hidden_layers": 3, "dropout": 0.1,
    },
    "vocab": {phoneme: number for number, phoneme in enumerate(PHONEMES, 1)},
}  # fmt: skip


def published_classes() -> ModuleType | None:
    """Return the package's module of the model, without its pipeline, which has many requirements; None if it is absent."""
    spec = find_spec("kokoro")
    if spec is None or spec.submodule_search_locations is None:
        return None
    package = ModuleType("kokoro")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules.setdefault("kokoro", package)
    if find_spec("loguru") is None:
        log = ModuleType("loguru")
        log.logger = SimpleNamespace(debug=lambda *args: None)  # type: ignore[attr-defined]
        sys.modules.setdefault("loguru", log)
    return importlib.import_module("kokoro.model")


def make_oracle(module: Any, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Return the published network with these tensors. `module`: of `published_classes`."""
    from transformers import AlbertConfig

    class Network(module.KModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            sizes = {"style_dim": config["style_dim"], "d_hid": config["hidden_dim"], "dropout": config["dropout"]}
            self.bert = module.CustomAlbert(AlbertConfig(vocab_size=config["n_token"], **config["plbert"]))
            self.bert_encoder = torch.nn.Linear(self.bert.config.hidden_size, config["hidden_dim"])
            self.predictor = module.ProsodyPredictor(nlayers=config["n_layer"], max_dur=config["max_dur"], **sizes)
            self.text_encoder = module.TextEncoder(
                config["hidden_dim"], config["text_encoder_kernel_size"], config["n_layer"], config["n_token"]
            )
            self.decoder = module.Decoder(
                dim_in=config["hidden_dim"], style_dim=config["style_dim"], dim_out=config["n_mels"], **config["istftnet"]
            )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = Network().eval()
    missing, surplus = network.load_state_dict(tensors, strict=False)
    assert not surplus
    assert all(name.startswith("bert.pooler.") for name in missing), missing
    return network


def published_shapes(config: dict[str, Any]) -> dict[str, torch.Size]:
    """Return the shapes of the published tensors by name, from our model."""
    from sensorium.models.families.kokoro.model import _NAMES, Kokoro
    from sensorium.models.weights import named_layers

    shapes = dict[str, torch.Size]()
    model = Kokoro(config, torch.float32, torch.device("meta"))
    views = {name: view for _, layer in named_layers(model).values() for name, view in layer.items()}
    for name, view in views.items():
        stored = name
        if name.startswith("bert."):
            for old, new in reversed(_NAMES):
                stored = stored.replace(f".{new}", f".{old}", 1)
        shapes[stored] = view.shape
    return shapes


def random_tensors(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return values with which every tensor matters, by their published names, drawn in the order of names.

    The pitch changes little: where it differs by rounding, a phase of the source may turn by a whole circle.
    """
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in sorted(published_shapes(config).items()):
        values, last = torch.randn(shape, generator=draw), name.rpartition(".")[2]
        if last == "weight_g":
            tensors[name] = 0.6 + 0.05 * values
        elif last == "gamma" or ".alpha" in name or (len(shape) == 1 and last == "weight"):
            tensors[name] = 1 + 0.2 * values
        elif len(shape) < 2:
            tensors[name] = 0.1 * values
        else:
            tensors[name] = values / shape[1:].numel() ** 0.5
    tensors["predictor.F0_proj.bias"] += 140.0  # hertz
    tensors["predictor.F0_proj.weight"] *= 4
    tensors["predictor.duration_proj.linear_layer.weight"] *= 60
    tensors["predictor.duration_proj.linear_layer.bias"] -= 1
    return tensors


def write_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> None:
    """Write a checkpoint in the publisher's layout, with two voices."""
    folder.joinpath("voices").mkdir(parents=True)
    folder.joinpath("config.json").write_text(json.dumps(config), "utf-8")
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, inner = name.partition(".")
        parts.setdefault(part, {})[f"module.{inner}"] = tensor
    torch.save(parts, folder / "kokoro-v1_0.pth")
    for number, voice in enumerate(VOICES):
        torch.save(random_voice(config, number), folder / "voices" / f"{voice}.pt")


def random_voice(config: dict[str, Any], seed: int) -> torch.Tensor:
    return torch.randn(510, 1, 2 * config["style_dim"], generator=torch.Generator().manual_seed(seed))
