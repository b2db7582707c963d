"""Default values of published decoder-only stacks: what their config.json may leave out.

Source: the configuration files of transformers 5.23.
"""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}
LLAMA = BASE | {"intermediate_size": 11008, "max_position_embeddings": 2048}
MISTRAL = LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
MINISTRAL3 = MISTRAL | {
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": 262144,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
INTERNLM3 = LLAMA | {
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}
QWEN = BASE | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN_MOE = QWEN | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
}
GLM: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
GLM_MOE = GLM | {
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": None,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
GEMMA: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GEMMA2 = GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3 = GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
}
ERNIE: dict[str, Any] = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
}
ERNIE_MOE = ERNIE | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 6,
    "num_experts": 64,
    "n_shared_experts": 2,
    "moe_layer_start_index": 1,
}
DEEPSEEK2 = LLAMA | {
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "num_experts": 64,
    "n_shared_experts": 2,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1407,
    "norm_topk_prob": False,
}
DEEPSEEK3 = DEEPSEEK2 | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
}
QWEN2_MOE = QWEN_MOE | {
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "attention_bias": True,
}
MIXTRAL = MISTRAL | {
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "rope_theta": 1e6,
}
OLMOE = LLAMA | {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
}
OLMO2 = LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5}
OLMO3 = OLMO2 | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500000.0}
EXAONE4 = LLAMA | {
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}
SMOLLM3 = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}
SEED_OSS = LLAMA | {
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "attention_out_bias": False,
}
HUNYUAN = LLAMA | {"vocab_size": 290943, "rms_norm_eps": 1e-5}
COHERE = BASE | {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
COHERE2 = COHERE | {"rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_pattern": 4}
STABLELM = BASE | {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}
STARCODER2 = BASE | {
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "tie_word_embeddings": True,
}
PHI3 = LLAMA | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
GPT_OSS = BASE | {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "num_experts_per_tok": 4,
    "num_experts": 128,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150000.0,
    },
}
DOTS1 = DEEPSEEK3 | {
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "kv_lora_rank": None,
    "num_experts": None,
    "n_shared_experts": None,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": None,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
MINIMAX_M2 = BASE | {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "rope_theta": 5000000.0,
}
ERNIE_VL = ERNIE_MOE | {"moe_intermediate_size": (1536, 512), "mrope_section": (22, 22, 20)}
NEMOTRON = BASE | {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
ARCEE = LLAMA | {
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
PHIMOE = MIXTRAL | {
    "vocab_size": 32064,
    "intermediate_size": 6400,
    "num_experts": 16,
    "original_max_position_embeddings": 4096,
    "router_jitter_noise": 0.01,
}
HUNYUAN_MOE = HUNYUAN | {"num_experts": 1, "num_experts_per_tok": 1, "n_shared_experts": 1}
SOLAR_OPEN = BASE | {
    "vocab_size": 196608,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "moe_intermediate_size": 1280,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "n_shared_experts": 1,
}
EXAONE_MOE = EXAONE4 | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
HELIUM = BASE | {
    "vocab_size": 48000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 1e5,
}
MISTRAL4 = DEEPSEEK3 | {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "max_position_embeddings": 1048576,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "rope_parameters": MINISTRAL3["rope_parameters"]
    | {"rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "max_position_embeddings": 1048576},
}
