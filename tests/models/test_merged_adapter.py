"""Adapters that are stored beside a base model are found, merged or refused. The oracle adds B(A(x)) to transformers' class."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fallbacks import hide_native
from family import ask, load_rows, save
from lora import GIVEN, Matrices, hook, matrices, write
from measured import peak_bytes
from parity import ROWS, LoadedModels, greedy, make_llm, record
from safetensors.torch import load_file
from sensorium import LLM
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints.merged_adapter import MergedAdapter
from sensorium.engine.model_files import load_model_files, resolve
from sensorium.engine.setup.doctor import describe_checkpoint
from sensorium.models.registry import find_architecture
from sensorium.processors.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoadedModels:
    return LoadedModels(tmp_path_factory.mktemp("adapters"))


def test_a_large_weight_is_changed_by_panels() -> None:
    """The sum is in float32 and rounded once. A float32 copy of the whole weight never exists."""
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 1024, generator=gen).bfloat16()
    down, up = torch.randn(4, 1024, generator=gen), torch.randn(4096, 4, generator=gen)
    names = {f"base_model.model.q_proj.lora_{letter}.weight": one for letter, one in (("A", down), ("B", up))}
    adapter = MergedAdapter(GIVEN, names.items(), (), torch.bfloat16)
    found = list[Any]()
    peak = peak_bytes(lambda: found.extend(adapter.merge([("q_proj.weight", weight)])))
    _, changed = found[-1]
    expected = (weight.float() + (up @ down) * 2).bfloat16()
    assert changed.dtype == torch.bfloat16
    torch.testing.assert_close(changed.float(), expected.float(), rtol=2**-7, atol=2**-20)
    assert peak < 1.6 * weight.nbytes


def test_an_adapter_of_decoder_and_tower(world: LoadedModels, tmp_path: Path) -> None:
    """The adapter has scales by module, rsLoRA's scale, and a head of its own."""
    row, base = ROWS["qwen3_vl"], world.folder("qwen3_vl")
    model, processor = row.load(base)
    pairs = matrices(model, r"language_model.*(q_proj|down_proj)|visual\.blocks.*(qkv|linear_fc1)")
    head = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)) / 8
    folder = write(
        tmp_path / "adapter", str(base), pairs, more={"base_model.model.lm_head.weight": head}, modules_to_save=["lm_head"],
        use_rslora=True, alpha_pattern={"q_proj": 4, r"language_model\.layers\.0\.mlp\.down_proj": 2},
    )  # fmt: skip
    scale = {}
    for name in pairs:
        alpha = 4 if name.endswith("q_proj") else 2 if name.endswith("language_model.layers.0.mlp.down_proj") else 8
        scale[name] = alpha / math.sqrt(4)
    hook(model, pairs, scale)
    model.lm_head.weight = torch.nn.Parameter(head)
    with make_llm(row, folder) as llm:
        assert llm.config.adapter == str(folder)
        compare(llm, row, model, processor)
    plain = make_llm(row, base)
    with pytest.raises(AssertionError):
        compare(plain, row, model, processor)
    plain.close()


def compare(llm: LLM, row: Any, model: Any, processor: Any, items: str = "i") -> None:
    from parity import positions

    question = ask(row, items, 0)
    output, ours = record(llm, question, 8)
    ids = output.outputs[0].token_ids
    theirs = row.run(model, question.theirs(processor), ids, positions(llm, question, len(ids)))
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("text-lfm2", r"conv\.(in|out)_proj|feed_forward\.w2|self_attn\.out_proj"),
        ("text-falcon_h1", r"mamba\.(in|out)_proj|self_attn\.v_proj|down_proj"),
        ("text-nemotron_h", r"mixer\.(in_proj|q_proj|up_proj)$"),
        ("text-qwen3_next", r"in_proj_(qkvz|ba)|linear_attn\.out_proj"),
        ("text-falcon", r"query_key_value|self_attention\.dense|dense_4h_to_h"),
        ("text-mamba", r"mixer\.(in|x|out)_proj"),
        ("text-kimi_linear", r"layers\.0\.self_attn\.(q|o|g_b|b)_proj|kv_a_proj_with_mqa"),
        ("text-minimax", r"qkv_proj|output_gate|self_attn\.out_proj"),
    ],
)
def test_an_adapter_of_layers_with_states(world: LoadedModels, tmp_path: Path, name: str, chosen: str) -> None:
    row, base = ROWS[name], world.folder(name)
    model, processor = row.load(base)
    pairs = matrices(model, chosen)
    hook(model, pairs, dict.fromkeys(pairs, 2.0))
    with make_llm(row, write(tmp_path / "adapter", str(base), pairs)) as llm:
        compare(llm, row, model, processor, "")
    plain = make_llm(row, base)
    with pytest.raises(AssertionError):
        compare(plain, row, model, processor, "")
    plain.close()


def old(name: str) -> str:
    """Return the name that transformers 4 gave the module."""
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def test_names_of_older_versions(world: LoadedModels, tmp_path: Path) -> None:
    row, base = ROWS["qwen2_vl"], world.folder("qwen2_vl")
    model, processor = row.load(base)
    pairs = matrices(model, r"language_model.*v_proj|visual.*\.qkv")
    folder = write(tmp_path / "adapter", "somewhere/else", pairs, old)
    hook(model, pairs, dict.fromkeys(pairs, 2.0))
    with make_llm(row, base, adapter=folder) as llm:
        compare(llm, row, model, processor)


SPELLINGS = (
    "model.layers.",
    "layers.",
    "language_model.model.layers.",
    "language_model.layers.",
    "model.language_model.layers.",
)
"""How a decoder's layers are named by an adapter that was trained on it alone, or in a model with encoders, old and new."""


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "llava", "internvl", "paligemma", "idefics3"])
def test_an_adapter_of_the_text_model_fits_the_model_with_encoders(world: LoadedModels, tmp_path: Path, name: str) -> None:
    row, base = ROWS[name], world.folder(name)
    model, processor = row.load(base)
    inside = next(
        one for one, _ in model.named_modules() if one.endswith("layers.0.self_attn") and not re.search("vis|tower", one)
    )
    stem = inside.removesuffix("layers.0.self_attn")
    pairs = matrices(model, rf"^{re.escape(stem)}layers\.\d+\.(self_attn\.[qv]_proj|mlp\.down_proj)$")

    def spelled(start: str) -> Path:
        folder = tmp_path / start.replace(".", "-")
        return write(folder, str(base), pairs, lambda one: start + one.removeprefix(f"{stem}layers."))

    folders = [spelled(start) for start in SPELLINGS]
    for folder in folders:
        describe_checkpoint(folder)
    hook(model, pairs, dict.fromkeys(pairs, 2.0))
    with make_llm(row, folders[0]) as llm:
        compare(llm, row, model, processor)
    weights = [_merged(name, base, folder) for folder in folders]
    for other in weights[1:]:
        assert all(torch.equal(other[key], tensor) for key, tensor in weights[0].items())
    absent = write(tmp_path / "absent", str(base), {"model.layers.99.self_attn.q_proj": next(iter(pairs.values()))})
    with pytest.raises(CheckpointError, match=r"changes model\.layers\.99\.self_attn\.q_proj"):
        describe_checkpoint(absent)


def _merged(name: str, base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the base model's weights with an adapter merged in."""
    files = load_model_files(base)
    model = resolve(find_architecture(files.architecture).model)(files.config, torch.float32, torch.device("meta"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    raw = json.loads((adapter / "adapter_config.json").read_text())
    return dict(
        MergedAdapter(raw, tensors.items(), model.prefixes, torch.float32).merge(load_file(base / "model.safetensors").items())
    )


def test_a_fallback_model(built: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter changes the weights of a fallback model, also if another version of transformers named them."""
    import transformers as tf

    hide_native(monkeypatch)
    folder = built("aya_vision")
    model = tf.AyaVisionForConditionalGeneration.from_pretrained(folder).eval()
    pairs = matrices(model, r"language_model.*q_proj|vision_tower.*fc1")
    adapter = write(tmp_path / "adapter", str(folder), pairs)
    loaded = []
    for given in (folder, adapter):
        with LLM(given, max_model_len=256, device="cpu") as llm:
            outer = llm.engine.loop.core.executor.runner.model.outer
            loaded.append({name: outer.get_submodule(name).weight.clone() for name in pairs})
    for name, (down, up) in pairs.items():
        torch.testing.assert_close(loaded[1][name] - loaded[0][name], 2 * up @ down, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(load_rows()["text-llama"], tmp_path_factory.mktemp("base") / "model")


def pair(rank: int = 4, outputs: int = 64, inputs: int = 64) -> Matrices:
    return {"model.layers.0.self_attn.q_proj": (torch.randn(rank, inputs), torch.randn(outputs, rank))}


def test_the_base_is_found_beside_the_adapter(base: Path) -> None:
    outputs = load_file(base / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].shape[0]
    folder = write(base.parent / "adapter", "../model", pair(outputs=outputs))
    assert describe_checkpoint(folder)["architecture"] == "LlamaForCausalLM"
    with LLM(folder, device="cpu", max_model_len=64) as llm:
        llm.sleep()
        llm.wake_up()


def test_files_of_the_adapter_take_precedence(base: Path, tmp_path: Path) -> None:
    """An adapter may bring its own tokens and template. The doctor describes it without its weights."""
    folder = write(tmp_path / "adapter", "base", {})
    shutil.copytree(base, folder / "base")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "base" / "model.safetensors").unlink()
    assert describe_checkpoint(folder)["chat template"] != "found"
    shutil.copy(base / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    number = max(tokenizer["model"]["vocab"].values()) + 100
    token = {"id": number, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append(token | {"special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert describe_checkpoint(folder)["chat template"] == "found"
    files = load_model_files(folder / "base", str(folder))
    lengths = [len(Tokenizer(one).encode("<new>", False)) for one in (files.tokenizer_folder, files.path)]
    assert lengths[0] == 1 < lengths[1]
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "A", "max_pixels": 7}))
    assert load_model_files(folder / "base", str(folder)).processors.image["max_pixels"] == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"), ({"bias": "all"}, "bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"), ({"base_model_name_or_path": None}, "adapter of None"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_are_refused(settings: dict[str, Any], message: str, base: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", str(base), pair(), **settings)
    with pytest.raises(ConfigError, match=message):
        LLM(folder, device="cpu", max_model_len=64)


def test_tensors_that_are_refused(base: Path, tmp_path: Path) -> None:
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    cases = [
        ("absent", {"model.layers.9.mlp.up_proj": pair()["model.layers.0.self_attn.q_proj"]}, {}, r"changes model\.layers\.9"),
        ("shape", pair(inputs=63), {}, "of shape"),
        ("rank", {"model.norm": (torch.zeros(2, 4), torch.zeros(4, 3))}, {}, "one rank"),
        ("rank 0", {"model.norm": (torch.zeros(0, 4), torch.zeros(4, 0))}, {}, "one rank"),
        (
            "no rows",
            {"model.norm": (torch.zeros(2, 4), torch.zeros(0, 2))},
            {},
            "no such module|which the base model does not store|of shape",
        ),
        ("dora", {}, {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": table}, "lora_magnitude"),
        ("unknown", {}, {"base_model.model.model.other.weight": table}, "unknown model.other.weight"),
    ]
    for name, pairs, more, message in cases:
        folder = write(tmp_path / name, str(base), pairs, more=more)
        with pytest.raises(CheckpointError, match=message):
            describe_checkpoint(folder)


PREFIXES = (("model.language_model.", "language_model."), ("model.visual.", "visual."))


def adapter_of(module: str) -> MergedAdapter:
    shapes = {"A": (4, 64), "B": (64, 4)}
    tensors = {f"base_model.model.{module}.lora_{letter}.weight": torch.zeros(shape) for letter, shape in shapes.items()}
    return MergedAdapter(GIVEN, tensors.items(), PREFIXES, torch.float32)


def headers(kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a text model of 4 layers beside a tower of 12. `kind` is that of the text model's weights."""
    names = [f"model.visual.layers.{number}.self_attn.q_proj.weight" for number in range(12)]
    names += [f"model.language_model.layers.{number}.self_attn.q_proj.{kind}" for number in range(4)]
    return {name: torch.empty(64, 64, device="meta") for name in names}


@pytest.mark.parametrize(
    "start", ["model.layers.5", "transformer.layers.1", "model.decoder.layers.1", "model.visual2.layers.1"]
)
@pytest.mark.parametrize("kind", ["weight", "qweight"])
def test_a_module_that_only_another_part_of_the_model_has(start: str, kind: str) -> None:
    with pytest.raises(CheckpointError, match="no such module"):
        adapter_of(f"{start}.self_attn.q_proj").add_headers(headers(kind))


@pytest.mark.parametrize("start", ["", "model.", "_orig_mod.model.", "thinker.model.", "model.language_model."])
def test_names_of_wrapped_decoders(start: str) -> None:
    adapter = adapter_of(f"{start}layers.1.self_attn.q_proj")
    adapter.add_headers(headers("weight"))
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    changed = dict(adapter.merge([(name, torch.ones(64, 64))]))
    assert list(changed) == [name]
    for kind in ("qweight", "weight_packed", "scales"):
        with pytest.raises(CheckpointError, match="in 16 or 32 bits"):
            adapter.add_headers(headers(kind))


def test_embeddings_of_a_tied_head_are_refused(tmp_path: Path) -> None:
    base = save(load_rows()["text-llama"], tmp_path / "base", tie=True)
    table = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    stem = "base_model.model.model.embed_tokens"
    low = {f"{stem}.lora_embedding_A": torch.randn(2, len(table)), f"{stem}.lora_embedding_B": torch.randn(table.shape[1], 2)}
    for name, more in (("saved", {f"{stem}.weight": table}), ("low", low)):
        with pytest.raises(CheckpointError, match="head is tied"):
            describe_checkpoint(write(tmp_path / name, str(base), {}, more=more))
    both = {f"{stem}.weight": table.clone(), "base_model.model.lm_head.weight": table}
    describe_checkpoint(write(tmp_path / "both", str(base), {}, more=both))


def test_an_adapter_with_other_tokens(tmp_path: Path) -> None:
    """Merged, its tables give the number of tokens; an engine whose requests choose adapters refuses it by name."""
    row = load_rows()["text-llama"]
    base = save(row, tmp_path / "base")
    model, processor = row.load(base)
    rows = model.config.vocab_size + 8
    model.resize_token_embeddings(rows, mean_resizing=False)
    gen, more = torch.Generator().manual_seed(2), dict[str, torch.Tensor]()
    for name in ("model.embed_tokens", "lm_head"):
        weight = model.get_submodule(name).weight
        weight.data = torch.randn(weight.shape, generator=gen) / 8
        more[f"base_model.model.{name}.weight"] = weight.data.clone()
    pairs = matrices(model, r"q_proj$")
    folder = write(tmp_path / "adapter", str(base), pairs, more=more)
    same = {name: tensor[:-8].clone() for name, tensor in more.items()}
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": rows - 8, "content": "<new>", "special": True})
    stored = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"added_tokens_decoder": {str(rows - 8): {"content": "<new>"}}},
        "added_tokens.json": {"<new>": rows - 8},
    }
    long = "tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "<new>"}}}
    with make_llm(row, base, enable_lora=True) as llm:
        with pytest.raises(CheckpointError, match="other tokens"):
            llm.load_adapter("mine", folder)
        for number, (name, content) in enumerate([*stored.items(), long]):
            words = write(tmp_path / f"words{number}", str(base), pairs, more=same)
            (words / name).write_text(json.dumps(content))
            with pytest.raises(CheckpointError, match="<new>"):
                llm.load_adapter("mine", words)
        assert llm.list_adapters() == ()
    hook(model, pairs, dict.fromkeys(pairs, 2.0))
    with make_llm(row, folder) as llm:
        compare(llm, row, model, processor, "")
        (output,) = llm.generate({"prompt_token_ids": [5, rows - 1]}, greedy(2), use_tqdm=False)
        assert output.error is None
