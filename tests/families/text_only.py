"""Text-only checkpoints in the parity suite: a row per kind of decoder; stacks that differ little are variants of one."""

import functools
from dataclasses import replace
from functools import partial

import torch
from family import Family
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from sensorium.models.text.stacks import STACKS

GROWING = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [4.0] * 8,
    "short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 1024, "factor": 4.0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
INDEXER = {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 24}  # so many heads that few keys have the score 0
GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4}
CAPS = {"attn_logit_softcapping": 10.0, "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 24, "sliding_window": 20}
WITHOUT_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
WITHOUT_VALUES |= {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
BESIDE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48}
MULTIPLIERS = {
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.8,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.8, 0.6],
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7],
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.6,
}
CHANGES = {
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 20},
    "ministral3": {"head_dim": 24, "rope_parameters": GROWING},
    "granite": {
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 0.5,
    },
    "cwm": {
        "head_dim": 24, "sliding_window": 20, "layer_types": ["full_attention"] + ["sliding_attention"] * 2,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    "iquestcoder": {"head_dim": 24},
    "ministral": {"head_dim": 16, "sliding_window": 20},
    "vaultgemma": {"head_dim": 24, **CAPS},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "youtu": {"num_key_value_heads": 4, **LATENT},
    "hyperclovax": {
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 1.5,
    },
    "gemma": {"head_dim": 24},
    "gemma2": {"head_dim": 24, **CAPS},
    "gemma3_text": {"head_dim": 24, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "gemma4_text": {
        "head_dim": 24, "global_head_dim": 32, "num_kv_shared_layers": 2, "num_hidden_layers": 5, "sliding_window": 20,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 700, "use_double_wide_mlp": True,
        "final_logit_softcapping": 8.0,
    },
    "gemma4_unified_text": {
        "head_dim": 24, "global_head_dim": 32, "num_hidden_layers": 4, "sliding_window": 20, "final_logit_softcapping": 8.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "gemma3n_text": {
        "head_dim": 24, "num_kv_shared_layers": 2, "num_hidden_layers": 4, "sliding_window": 20, "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 600, "pad_token_id": 0, "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0],
        "intermediate_size": [128, 96, 128, 112], "final_logit_softcapping": 8.0,
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
    "glm4_moe": {"n_routed_experts": 8, "first_k_dense_replace": 1, **EXPERTS},
    "qwen3_moe": {"num_experts": 8, **EXPERTS},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 1, **EXPERTS},
    "deepseek_v2": {"n_routed_experts": 8, **EXPERTS, **LATENT, **GROUPS, "topk_method": "group_limited_greedy"},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 40, **EXPERTS},
    "exaone4": {"sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "cohere2": {"sliding_window": 20, "logit_scale": 0.5, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "starcoder2": {"sliding_window": 20},
    "hunyuan_v1_dense": {"head_dim": 16},
    "deepseek_v3": {"n_routed_experts": 8, **EXPERTS, **LATENT, **GROUPS},
    "deepseek_v32": {"n_routed_experts": 8, **EXPERTS, **LATENT, **GROUPS, **INDEXER},
    "glm_moe_dsa": {
        "n_routed_experts": 8, "first_k_dense_replace": 1, "num_hidden_layers": 4, "num_key_value_heads": 4,
        "indexer_types": ["full", "shared", "full", "shared"], **EXPERTS, **LATENT, **INDEXER,
    },
    "glm4_moe_lite": {"n_routed_experts": 8, "num_key_value_heads": 4, **EXPERTS, **LATENT},
    "dots1": {"head_dim": 24, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS},
    "minimax_m2": {
        "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "logits_scaling": 0.5},
    "nemotron": {"head_dim": 24, "attention_bias": True},
    "arcee": {"mlp_bias": True},
    "phimoe": {
        "num_local_experts": 8, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2,
        "rope_parameters": LONG,
    },
    "hunyuan_v1_moe": {
        "head_dim": 16, "num_experts": 8, "moe_topk": [2, 2, 2],
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0},
    },
    "granitemoeshared": {
        "num_local_experts": 8, "shared_intermediate_size": 40, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
    },
    "solar_open": {"head_dim": 24, "n_routed_experts": 8, **EXPERTS},
    "exaone_moe": {
        "head_dim": 24, "num_experts": 8, "num_key_value_heads": 4, "sliding_window": 20,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"], **EXPERTS,
    },
    "helium": {"head_dim": 16},
    "mistral4": {
        "n_routed_experts": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1, "rope_parameters": GROWING, **EXPERTS,
        **LATENT,
    },
    "llama4_text": {
        "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 192, "num_local_experts": 8,
        "attention_chunk_size": 32, "no_rope_layers": [1, 0, 1], "moe_layers": [0, 2], "floor_scale": 8, "attn_scale": 0.5,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "block_multiple_of": 16},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "num_experts": 8, **EXPERTS,
    },
    "bamba": {
        "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_proj_bias": True,
    },
    "falcon_h1": {
        "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24, **MULTIPLIERS,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 24, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, "n_routed_experts": 8, "moe_latent_size": 40,
        "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5, **EXPERTS,
    },
    "mamba": {"state_size": 12},
    "falcon_mamba": {"state_size": 12},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 8, "head_dim": 24,
        "num_experts_per_tok": 2, "block_size": 8, "full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.1,
    },
    "granitemoehybrid": {
        "num_local_experts": 0, "shared_intermediate_size": 40, "attention_multiplier": 0.2, "residual_multiplier": 0.6,
        "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_expand": 2, "position_embedding_type": "rope",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen3_next": {
        "head_dim": 16, "num_experts": 8, "shared_expert_intermediate_size": 40, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], **EXPERTS,
    },
    "olmo_hybrid": {
        "linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "kimi_linear": {
        "num_experts": 8, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16, **EXPERTS, **LATENT,
        "q_lora_rank": None, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "falcon": {"ffn_hidden_size": 96, "num_kv_heads": 2, "new_decoder_architecture": True},
    "opt": {"ffn_dim": 128, "num_key_value_heads": 4},
    "step3p5": {
        "head_dim": 16, "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 20,
        "moe_layers_enum": "1,2", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "share_expert_dim": 40, "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
        "rope_theta": [1e4, 5e3, 1e4], "partial_rotary_factors": [0.5, 1.0, 0.5], "swiglu_limits": [0.0, 0.7, 0.0],
        "swiglu_limits_shared": [0.6, 0.0, 0.9],
    },
    "gpt_oss": {
        "head_dim": 24, "intermediate_size": 32, "sliding_window": 20, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@functools.cache
def step35_class():
    """Return Step 3.5: transformers has its decoder, as a part of Step-3.7."""
    import transformers as tf
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

    class Step3p5ForCausalLM(Step3p7PreTrainedModel, tf.GenerationMixin):
        config: tf.Step3p7TextConfig

        def __init__(self, config):
            super().__init__(config)
            self.model = Step3p7TextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, input_ids, past_key_values=None, use_cache=True):
            out = self.model(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache)
            return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values)

    return Step3p5ForCausalLM


def load_step35(folder):
    import transformers as tf

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = step35_class().from_pretrained(folder, dtype=torch.float32, **plain).eval()
    return model, tf.PreTrainedTokenizerFast.from_pretrained(folder)


def build(seed, kind, **changes):
    ensure_torchvision()
    import transformers as tf

    words = fast_tokenizer(["<bos>", "<eos>"], eos_token="<eos>", pad_token="<eos>", bos_token="<bos>")
    config = tf.CONFIG_MAPPING[kind](**text_config(words, **CHANGES.get(kind, {}) | changes))
    alone = {"mistral4": lambda: tf.Mistral4ForCausalLM, "step3p5": step35_class}  # transformers does not find them by config
    model = (alone[kind]()(config) if kind in alone else tf.AutoModelForCausalLM.from_config(config)).eval()
    randomise(model, seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name and ".linear_attn." not in name:
            parameter.data.mul_(5 if name.endswith("indexer.k_norm.bias") else 1)  # else it hardly changes which keys are best
            parameter.data.sub_(STACKS[kind].norm_offset if kind in STACKS else 0)  # the weight is stored minus 1
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.0, generator=generator)
    return model, words


def run_whole(model, inputs, answer, positions):
    """Run the oracle without its cache: it counts the positions of an answer wrongly if the first layer has a state."""
    ids = torch.cat((inputs["input_ids"], torch.tensor([answer[:-1]], dtype=torch.long)), 1)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0].float()


def row(kind, *alike, variants=None, **more):
    return Family(
        f"text-{kind}",
        partial(build, kind=kind),
        placeholders={},
        sizes={},
        cases=["", "", ""],
        variants={other: {"kind": other} for other in alike} | {"tied": {"tie": True}} | (variants or {}),
        **more,
    )


PLAIN = ("nemotron", "arcee", "helium", "hyperclovax", "cwm", "iquestcoder", "jais2", "ministral")
MIXTURES = ("flex_olmo", "phimoe", "hunyuan_v1_moe", "granitemoeshared", "solar_open", "exaone_moe")
NORMED = {  # name -> model type and values of config.json that few checkpoints have
    "cohere, normed heads": ("cohere", {"use_qk_norm": True, "num_key_value_heads": 2}),
    "stablelm": ("stablelm", {}),
    "stablelm, normed heads": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "olmoe, clamped": ("olmoe", {"clip_qkv": 0.7, "num_experts": 8, "num_experts_per_tok": 2}),
    "internlm3, biases": ("internlm3", {"bias": True, "qkv_bias": True, "head_dim": 16}),
}
KEY_BIASES = {
    f"model.decoder.layers.{i}.self_attn.k_proj.bias": "a bias of the keys moves all scores of a row alike" for i in range(3)
}
GELU = {"hidden_act": "gelu"}
FALCONS = {  # name -> values of config.json
    "one norm": {"num_ln_in_parallel_attn": 1, "bias": True},
    "multi-query": {"new_decoder_architecture": False, "activation": "gelu_pytorch_tanh", "ffn_hidden_size": None},
    "a key per query": {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None, "bias": True},
    "not parallel": {"new_decoder_architecture": False, "parallel_attn": False},
}
BIASES = dict.fromkeys(("attention_bias", "mamba_proj_bias", "projectors_bias", "mlp_bias", "use_bias"), True)
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
FAMILIES = [
    row("llama", "mistral", "ministral3", "qwen2", "qwen3", "granite", "glm", "glm4", "ernie4_5", "olmo", *PLAIN),
    row("gemma3_text", "gemma", "gemma2", "vaultgemma"),
    row("gemma3n_text"),
    row("gemma4_text", "gemma4_unified_text", variants={"keys as values": WITHOUT_VALUES, "experts": BESIDE}),
    row(
        "qwen3_moe",
        "glm4_moe",
        "ernie4_5_moe",
        "qwen2_moe",
        "mixtral",
        *MIXTURES,
        variants={"windows": {"kind": "qwen2_moe", **WINDOWS}, "biases": {"kind": "ernie4_5_moe", **BIASES}},
    ),
    row("lfm2", "lfm2_moe", variants={"experts without correction": {"kind": "lfm2_moe", "use_expert_bias": False}}),
    row("llama4_text", variants={"wide experts": {"intermediate_size": 48}}),
    row("granitemoehybrid", variants={"gelu": GELU}),
    row("bamba", run=run_whole, variants={"gelu": GELU}),
    row("falcon_h1", variants={"biases": BIASES, "gelu": GELU}),
    row("nemotron_h", variants={"biases": BIASES | {"mamba_hidden_act": "gelu"}}),
    row("mamba", "falcon_mamba", run=run_whole, variants={"gelu": GELU | {"use_bias": True, "use_conv_bias": False}}),
    row("mamba2", variants={"gelu": GELU}),
    row(
        "olmo_hybrid",
        variants={
            "no positions": {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
            "rates below 1": {"linear_allow_neg_eigval": False, **GELU},
        },
    ),
    # the residual stream is a sum of few terms, each rounded
    row("minimax", run=run_whole, half=(0.15, 0.1), variants={"gelu": GELU}),
    # in half precision some rows take another expert, in transformers by up to 0.23 too
    row("kimi_linear", run=run_whole, half=(0.25, 0.2), variants={"gelu": GELU, "compressed queries": {"q_lora_rank": 24}}),
    row("falcon", variants=FALCONS),
    row("opt", silent=KEY_BIASES, variants={"without biases": {"enable_bias": False}, "gelu": {"activation_function": "gelu"}}),
    row("gpt_oss", "dots1", "minimax_m2", "granitemoe"),
    row(
        "cohere2",
        "exaone4",
        "hunyuan_v1_dense",
        "phi3",
        "starcoder2",
        variants={name: {"kind": kind, **values} for name, (kind, values) in NORMED.items()},
    ),
    # in half precision some rows take another expert, in transformers too
    row("deepseek_v3", "deepseek_v2", "mistral4", "glm4_moe_lite", "youtu", half=(0.1, 0.2)),
    # in half precision some rows select other keys; the logits of transformers' bfloat16 are off by up to 0.4
    row("deepseek_v32", half=(0.1, 0.2)),
    row("glm_moe_dsa", half=(0.4, 0.2)),
    row("qwen3_next", variants={"gelu": GELU}, half=(0.2, 0.2)),
    replace(row("step3p5", load=load_step35), variants={"no limits": {"swiglu_limits": None, "swiglu_limits_shared": None}}),
]
