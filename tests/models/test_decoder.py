"""Every published stack against transformers on a small random checkpoint, in chunks through the paged cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from measured import held, peak_bytes
from oracle import ensure_torchvision, randomise
from safetensors.torch import save_file
from sensorium.callers.errors import CheckpointError, ConfigError
from sensorium.checkpoints import weight_files
from sensorium.engine.model_files import load_model_files
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.models import weights
from sensorium.models.decoder_model import TEXT_PREFIXES, DecoderModel
from sensorium.models.interface import ForwardBatch, StepLimits
from sensorium.models.text.decoder_config import decoder_spec
from sensorium.models.text.spec import chunked_sections, hw_interleaved_sections, interleaved_sections
from sensorium.models.text.stacks import stack_of
from sensorium.models.weights import weight_bytes

SMALL = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
GROWING = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.4}
GEMMA = {"head_dim": 32, "tie_word_embeddings": True}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONG = PARTIAL | {
    "rope_type": "longrope", "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3, 2.0, 2.5, 3.0],
    "long_factor": [4.0] * 6,
}  # fmt: skip
FEW = {"num_experts_per_tok": 3, "intermediate_size": 8}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0}
MIXED = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
MULTIPLIERS = {"embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
ERNIE_MOE = {"moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2}
GEMMA3 = GEMMA | {
    "sliding_window": 7, "query_pre_attn_scalar": 24, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_key_value_heads": 4,
    "n_shared_experts": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
GLM_MOE = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.7}
TEMPERED = LATENT | GROUPS | {
    "first_k_dense_replace": 0, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "ministral3": ("ministral3", {"rope_parameters": GROWING, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", MIXED | {"norm_topk_prob": True}),
    "qwen3_moe, some plain": ("qwen3_moe", MIXED | {"mlp_only_layers": [1]}),
    "glm4": ("glm4", {"head_dim": 32}),
    "glm4_moe": ("glm4_moe", GLM_MOE),
    "glm4_moe, normed heads": ("glm4_moe", GLM_MOE | GROUPS | {"use_qk_norm": True, "head_dim": 32}),
    "gemma": ("gemma", GEMMA),
    "granite": ("granite", MULTIPLIERS),
    "ernie4_5": ("ernie4_5", {"head_dim": 32, "use_bias": True}),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE_MOE),
    "mistral, windows": ("mistral", {"sliding_window": 7}),
    "gemma2": ("gemma2", GEMMA | {"sliding_window": 7, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "deepseek_v2": ("deepseek_v2", LATENT | {"topk_method": "greedy", "first_k_dense_replace": 1}),
    "deepseek_v2, groups": ("deepseek_v2", LATENT | GROUPS | {"topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", LATENT | GROUPS | {"first_k_dense_replace": 1, "n_shared_experts": 1}),
    "mixtral": ("mixtral", FEW | {"num_local_experts": 8}),
    "olmoe": ("olmoe", FEW | {"num_experts": 8}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 7, "num_hidden_layers": 4, "rope_scaling": YARN}),
    "exaone4": ("exaone4", {"sliding_window": 7, "num_hidden_layers": 4}),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "qwen2_moe": ("qwen2_moe", MIXED | {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 96}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "internlm3": ("internlm3", {"head_dim": 32}),
    "seed_oss": ("seed_oss", {"head_dim": 32, "residual_dropout": 0.0}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": ALPHA}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": 7, "num_hidden_layers": 4, "logit_scale": 0.5}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "starcoder2": ("starcoder2", {}),
    "phi3": ("phi3", {}),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONG}),
    "deepseek_v3, yarn": ("deepseek_v3", TEMPERED),
}
LENGTH = 41


class TextModel(DecoderModel):
    prefixes = (("model.", "language_model."), *TEXT_PREFIXES)


def build_oracle(name: str, seed: int = 0) -> Any:
    """Build a small random text model of transformers, in eval mode."""
    ensure_torchvision()
    import transformers as tf

    kind, changes = CASES[name]
    config = tf.AutoConfig.for_model(kind, **(SMALL | changes))
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model, seed)
    with torch.no_grad():
        for part in model.parameters():
            if part.ndim == 3:  # all experts in one tensor
                part.mul_(part.shape[1] ** 0.5)
        for label, buffer in model.named_buffers():
            if label.endswith("correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    return model


def load_ours(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> TextModel:
    config = load_model_files(path).config
    model = TextModel(decoder_spec(config, stack_of(config), **changes), dtype, torch.device("cpu"))
    weights.load(path, model)
    return model


def run_ours(
    model: TextModel, ids: torch.Tensor, cuts: tuple[int, ...] = (23, 24), block: int = 4, rows: Any = (None, None)
) -> torch.Tensor:
    """Run one request in steps cut before these rows, on scattered blocks; `rows`: index of the encoder rows, and the rows."""
    blocks = -(-len(ids) // block)
    table = torch.arange(blocks, 0, -1, dtype=torch.int32)[None]
    caches = [torch.zeros(s.planes, blocks + 1, block, s.kv_heads, s.head_dim, dtype=s.dtype) for s in model.cache_specs]
    logits = []
    for first, last in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        token = torch.arange(first, last)
        slots = table[0].long()[token // block] * block + token % block
        attn = AttentionMetadata((0, last - first), (last,), table, slots, block)
        attns = [attn if s.window is None else replace(attn, window=s.window) for s in model.cache_specs]
        batch = ForwardBatch(ids[first:last], token[None].expand(model.rope_axes, -1), attns, caches, *rows)
        with torch.inference_mode():
            logits.append(model.compute_logits(model.forward(batch)))
    return torch.cat(logits)


def run_oracle(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids[None]).logits[0].float()


def some_ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(1, SMALL["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(seed))


def tolerance(theirs: torch.Tensor) -> float:
    return 2e-4 * max(1.0, float(theirs.std()))


@pytest.mark.parametrize("name", CASES)
def test_logits_equal(name: str, tmp_path: Path) -> None:
    oracle = build_oracle(name)
    oracle.save_pretrained(tmp_path)
    theirs = run_oracle(oracle, some_ids())
    ours = run_ours(load_ours(tmp_path), some_ids())
    assert theirs.std() > 0.3
    assert (ours - theirs).abs().max() < tolerance(theirs)


def _unseen(oracle: Any, ours: torch.Tensor) -> list[str]:
    """Return tensors that can be zeroed without a visible change of logits."""
    unseen = []
    for name, tensor in [*oracle.named_parameters(), *oracle.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        kept = tensor.data.clone()
        tensor.data.copy_(torch.zeros_like(kept))
        if not (ours - run_oracle(oracle, some_ids())).abs().max() > 20 * tolerance(ours):
            unseen.append(name)
        tensor.data.copy_(kept)
    return unseen


@pytest.mark.parametrize("name", CASES)
def test_comparison_sees_every_tensor(name: str) -> None:
    oracle = build_oracle(name)
    assert _unseen(oracle, run_oracle(oracle, some_ids())) == []


@pytest.mark.parametrize("name", [name for name, (kind, _) in CASES.items() if "moe" in kind or "deepseek" in kind])
def test_experts_in_one_tensor_or_by_themselves(name: str, tmp_path: Path) -> None:
    """Experts load as transformers 5 holds them in memory, and as it stores them, by the names of transformers 4."""
    oracle = build_oracle(name)
    oracle.save_pretrained(tmp_path)
    stored = dict(weight_files.read_checkpoint(tmp_path))
    assert any(".experts.0." in label for label in stored)
    expected = run_ours(load_ours(tmp_path), some_ids())
    own = {label: tensor.contiguous() for label, tensor in oracle.state_dict().items()}
    assert any(label.endswith("experts.gate_up_proj") for label in own)
    save_file(own, tmp_path / "model.safetensors")
    assert torch.equal(run_ours(load_ours(tmp_path), some_ids()), expected)
    turned = {label: tensor.mT.contiguous() if tensor.ndim == 3 else tensor for label, tensor in own.items()}
    save_file(turned, tmp_path / "model.safetensors")
    assert torch.equal(run_ours(load_ours(tmp_path), some_ids()), expected)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma2", "deepseek_v3"])
def test_no_bit_depends_on_where_a_prompt_is_cut(name: str, tmp_path: Path) -> None:
    build_oracle(name).save_pretrained(tmp_path)
    model = load_ours(tmp_path)
    whole = run_ours(model, some_ids(), ())
    for cuts in ((23, 24), (1, 7, 30), tuple(range(1, LENGTH))):
        assert torch.equal(run_ours(model, some_ids(), cuts), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["glm4", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Logits are near the float32 ones, as far as the format allows; unrelated ones would be 1.4 standard deviations off."""
    oracle = build_oracle(name)
    oracle.save_pretrained(tmp_path)
    theirs, ours = run_oracle(oracle, some_ids()), run_ours(load_ours(tmp_path, dtype), some_ids())
    off = (ours - theirs).square().mean(-1).sqrt()  # per row; nearly equal experts may be chosen differently
    assert off.median() / theirs.std() < (0.1 if dtype == torch.bfloat16 else 0.02)


def test_levels_are_added_after_the_first_layers(tmp_path: Path) -> None:
    oracle = build_oracle("llama")
    oracle.save_pretrained(tmp_path)
    model = load_ours(tmp_path, deepstack=(0, 1))
    where, width = torch.tensor([3, 4, 5, 11]), SMALL["hidden_size"]
    rows = torch.randn(4, 3 * width, generator=torch.Generator().manual_seed(2))
    first, *levels = rows.split(width, 1)

    def add(level: torch.Tensor) -> Any:
        return lambda layer, args, out: out.index_add(1, where, level[None])

    for layer, level in zip(oracle.model.layers[:2], levels, strict=True):
        layer.register_forward_hook(add(level))
    with torch.inference_mode():
        embeds = oracle.model.embed_tokens(some_ids()).index_copy(0, where, first)
        theirs = oracle(inputs_embeds=embeds[None]).logits[0]
    assert (run_ours(model, some_ids(), (), rows=(where, rows)) - theirs).abs().max() < tolerance(theirs)


def test_experts_by_modality_and_positions_of_three_axes(tmp_path: Path) -> None:
    """Compare hidden states, since transformers has this stack only inside a larger model."""
    ensure_torchvision()
    from transformers.models.ernie4_5_vl_moe import configuration_ernie4_5_vl_moe as configs
    from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as models

    mixed = {"moe_intermediate_size": [24, 12], "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2}
    rope = {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 10000.0}
    config = configs.Ernie4_5_VLMoeTextConfig(**(SMALL | mixed | {"rope_parameters": rope, "tie_word_embeddings": True}))
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    oracle = models.Ernie4_5_VLMoeTextModel(config).eval()
    randomise(oracle, 0)
    config.architectures = ["Text"]
    config.save_pretrained(tmp_path)
    save_file(
        {f"model.{name}": tensor.contiguous() for name, tensor in oracle.state_dict().items()}, tmp_path / "model.safetensors"
    )
    model = load_ours(tmp_path)
    positions = torch.randint(0, 60, (3, LENGTH), generator=torch.Generator().manual_seed(5))
    kinds = (torch.arange(LENGTH) // 9) % 2
    attn = AttentionMetadata((0, LENGTH), (LENGTH,), torch.arange(3, dtype=torch.int32)[None], torch.arange(LENGTH), 16)
    caches = [torch.zeros(s.planes, 3, 16, s.kv_heads, s.head_dim, dtype=s.dtype) for s in model.cache_specs]
    batch = ForwardBatch(some_ids(), positions, [attn] * len(caches), caches, modality_ids=kinds)
    with torch.inference_mode():
        theirs = oracle(some_ids()[None], position_ids=positions[:, None], moe_mm_token_type_ids=kinds[None]).last_hidden_state
        assert (model.forward(batch) - theirs[0]).abs().max() < tolerance(theirs)

    def run() -> None:
        given = {name: getattr(batch, name).clone() for name in ("input_ids", "positions")}
        model.forward(replace(batch, **given, modality_ids=torch.ones_like(kinds)))

    planned = model.forward_bytes(StepLimits(LENGTH, LENGTH, LENGTH, torch.device("cpu")))
    assert planned / 1.2 < peak_bytes(run) <= planned  # all rows of one modality, copied


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    build_oracle("qwen3_moe").save_pretrained(tmp_path)
    stored = dict(weight_files.read_checkpoint(tmp_path))

    def attempt(changed: dict[str, torch.Tensor]) -> TextModel:
        save_file(changed, tmp_path / "model.safetensors")
        return load_ours(tmp_path)

    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    with pytest.raises(CheckpointError, match=r"lacks language_model\.layers\.1\.mlp\.experts\.5\.down_proj\.weight"):
        attempt({label: tensor for label, tensor in stored.items() if label != name})
    with pytest.raises(CheckpointError, match=r"holds unknown model\.layers\.7\.norm\.weight"):
        attempt(stored | {"model.layers.7.norm.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj\.weight has shape \[3, 3\]"):
        attempt(stored | {name: torch.zeros(3, 3)})
    with pytest.raises(CheckpointError, match="twice, under its old and its new name"):
        attempt(stored | {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(8, 48, 64)})


def test_ignored_tensors_are_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_oracle("llama").save_pretrained(tmp_path)
    stored = dict(weight_files.read_checkpoint(tmp_path))
    extra = {"model.layers.3.eh_proj.weight": torch.randn(2, 2), "talker.x": torch.randn(2, 2)}
    save_file(stored | extra, tmp_path / "model.safetensors")
    monkeypatch.setattr(TextModel, "ignored", ("language_model.layers.3.", "talker."))
    load_ours(tmp_path)
    monkeypatch.setattr(TextModel, "ignored", ("talker.",))
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj"):
        load_ours(tmp_path)


def test_settings_that_a_stack_does_not_implement_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        stack_of({"model_type": "phimoe", "num_experts_per_tok": 3})
    with pytest.raises(ConfigError, match="word_embed_proj_dim"):  # OPT-350m
        stack_of({"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512})


def test_windows_of_older_configs() -> None:
    """Configs of transformers 4 have a pattern and two bases at the top level."""
    text = SMALL | GEMMA | {"num_hidden_layers": 7, "model_type": "gemma3_text", "sliding_window": 7}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = text | {"sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    ropes = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": scaling | {"rope_theta": 1e6}}
    new = text | {"layer_types": kinds, "rope_parameters": ropes}
    spec = decoder_spec(old, stack_of(old))
    assert [attention.window for attention in spec.attentions] == [7, 7, None, 7, 7, None, 7]
    assert [rope.theta for rope in spec.ropes] == [1e4, 1e6]
    same = decoder_spec(new, stack_of(new))
    for ours, theirs in zip(spec.attentions, same.attentions, strict=True):
        assert (ours.window, ours.rope.theta, ours.rope.axes) == (theirs.window, theirs.rope.theta, theirs.rope.axes)
        assert ours.rope.scaling.get("factor") == theirs.rope.scaling.get("factor")


def test_axes_of_frequencies() -> None:
    assert chunked_sections((2, 1, 1)) == (0, 0, 1, 2)
    assert interleaved_sections((4, 2, 2)) == (0, 1, 2, 0, 1, 2, 0, 0)
    assert hw_interleaved_sections((2, 2, 1)) == (1, 2, 1, 2, 0)
    assert interleaved_sections((3, 2, 2, 2)) == (0, 1, 2, 3, 0, 1, 2, 3, 0)
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2, 2], "rope_theta": 1e4}
    assert decoder_spec(SMALL | {"rope_parameters": rope}).rope_axes == 4
    assert decoder_spec(SMALL).rope_axes == 1
    for sections in ([4, 4, 0], [8, 0, 0]):  # an axis without frequencies still advances the text after an item
        assert decoder_spec(SMALL | {"rope_parameters": rope | {"mrope_section": sections}}).rope_axes == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma2", "ernie4_5_moe", "deepseek_v3"])
def test_weights_take_what_is_planned(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    build_oracle(name).save_pretrained(tmp_path)
    config = load_model_files(tmp_path).config
    unloaded = TextModel(decoder_spec(config, stack_of(config)), dtype, torch.device("meta"))
    assert weight_bytes(unloaded, torch.device("cpu")) == held(load_ours(tmp_path, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "glm4", "gemma2", "granite", "ernie4_5_moe", "deepseek_v2", "deepseek_v3"])
def test_a_step_takes_what_is_planned(name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is within 10 %, for sizes that overheads do not hide."""
    for key, value in {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 8}.items():
        monkeypatch.setitem(SMALL, key, value)
    build_oracle(name).save_pretrained(tmp_path)
    model = load_ours(tmp_path, dtype)
    ids = torch.randint(1, 100, (256,), generator=torch.Generator().manual_seed(1))
    table = torch.arange(16, dtype=torch.int32)[None]
    caches = [torch.zeros(s.planes, 16, 16, s.kv_heads, s.head_dim, dtype=s.dtype) for s in model.cache_specs]
    attn = AttentionMetadata((0, 256), (256,), table, torch.arange(256), 16)

    def run() -> None:
        attns = [replace(attn, window=s.window) for s in model.cache_specs]
        rows = (torch.arange(256), torch.zeros(256, 192, dtype=dtype))
        model.forward(ForwardBatch(ids.clone(), torch.arange(256)[None].clone(), attns, caches, *rows))

    planned = model.forward_bytes(StepLimits(256, 256, 256, torch.device("cpu")))
    assert peak_bytes(run) == pytest.approx(planned, rel=0.1)
