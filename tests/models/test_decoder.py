"""Every published stack against transformers on a small random checkpoint, in chunks through the paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import ensure_torchvision, randomise
from safetensors.torch import save_file
from sensorium.engine.config import load_model_files
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.models import weights
from sensorium.models.config import decoder_spec
from sensorium.models.decoder_model import TEXT_PREFIXES, DecoderModel
from sensorium.models.interface import ForwardBatch
from sensorium.models.text.stacks import stack_of

SMALL = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
GEMMA = {"head_dim": 32, "tie_word_embeddings": True}
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
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", MIXED | {"norm_topk_prob": True}),
    "qwen3_moe, some plain": ("qwen3_moe", MIXED | {"mlp_only_layers": [1]}),
    "glm4": ("glm4", {"head_dim": 32}),
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
    "deepseek_v3, yarn": ("deepseek_v3", TEMPERED),
}
LENGTH = 41


class TextModel(DecoderModel):
    prefixes = (("model.", "language_model."), *TEXT_PREFIXES)


def build_oracle(name: str, seed: int = 0) -> Any:
    """A small random text model of transformers, in eval mode."""
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


def load_ours(path: Path, dtype: torch.dtype = torch.float32) -> TextModel:
    config = load_model_files(path).config
    model = TextModel(decoder_spec(config, stack_of(config)), dtype, torch.device("cpu"))
    weights.load(path, model)
    return model


def run_ours(model: TextModel, ids: torch.Tensor, cuts: tuple[int, ...] = (23, 24), block: int = 4) -> torch.Tensor:
    """One request in several steps, cut before these rows, on scattered blocks."""
    blocks = -(-len(ids) // block)
    table = torch.arange(blocks, 0, -1, dtype=torch.int32)[None]
    caches = [torch.zeros(s.planes, blocks + 1, block, s.kv_heads, s.head_dim, dtype=s.dtype) for s in model.cache_specs]
    logits = []
    for first, last in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        token = torch.arange(first, last)
        slots = table[0].long()[token // block] * block + token % block
        attn = AttentionMetadata((0, last - first), (last,), table, slots, block)
        batch = ForwardBatch(ids[first:last], token[None].expand(model.rope_axes, -1), [attn] * len(caches), caches)
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
    """Tensors that may be moved without the comparison with ours noticing."""
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
    """As transformers 5 keeps them in memory, and as it stores them, by the names of transformers 4."""
    oracle = build_oracle(name)
    oracle.save_pretrained(tmp_path)
    stored = dict(weights.read_checkpoint(tmp_path))
    assert any(".experts.0." in label for label in stored)
    expected = run_ours(load_ours(tmp_path), some_ids())
    own = {label: tensor.contiguous() for label, tensor in oracle.state_dict().items()}
    assert any(label.endswith("experts.gate_up_proj") for label in own)
    save_file(own, tmp_path / "model.safetensors")
    assert torch.equal(run_ours(load_ours(tmp_path), some_ids()), expected)
    turned = {label: tensor.mT.contiguous() if tensor.ndim == 3 else tensor for label, tensor in own.items()}
    save_file(turned, tmp_path / "model.safetensors")
    assert torch.equal(run_ours(load_ours(tmp_path), some_ids()), expected)
