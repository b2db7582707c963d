"""vLLM's names of its parsers, and the format that each of them reads."""

CALL_PARSERS = {
    **dict.fromkeys(("hermes", "qwen3_coder", "qwen3_xml", "glm45", "glm47", "mimo", "step3p5", "granite4"), "tagged"),
    **dict.fromkeys(("ernie45", "poolside_v1", "ling3"), "tagged"),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), "deepseek"),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "deepseek_v41"), "dsml"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "actions"),
    **dict.fromkeys(("jamba", "hunyuan_a13b", "hy_v3", "hy_v4", "minimax"), "call_list"),
    **dict.fromkeys(("llama3_json", "llama4_json"), "python_tag"),
    **dict.fromkeys(("granite", "phi4_mini_json"), "json_mark"),
    "granite-20b-fc": "granite_20b_fc",
    "dots": "dots_tags",
    "inkling": "typed_blocks",
    "internlm": "internlm",
    "kimi_k2": "sections",
    "kimi_k3": "open_close",
    "lfm2": "python_block",
    "llama4_pythonic": "python_start",
    "longcat": "longcat",
    "minicpm5": "function_tags",
    "minimax_m2": "invoke_tags",
    "minimax_m3": "marked_tags",
    "mistral": "bracketed",
    "olmo3": "python_lines",
    "openai": "harmony",
    "pythonic": "pythonic",
    "seed_oss": "seed_tags",
    "solar_open2": "solar_open2",
    "step3": "step3",
    "xlam": "object_list",
    "gigachat3": "gigachat3",
    "functiongemma": "escape_tokens",
    "gemma4": "quote_tokens",
    "apertus": "apertus",
    "zaya_xml": "zyphra_tags",
}

REASONING_PARSERS = {
    **dict.fromkeys(("qwen3", "deepseek_v3", "deepseek_v4", "glm45", "glm47", "mimo", "nemotron_v3"), "think"),
    **dict.fromkeys(("step3p5", "poolside_v1", "hy_v3", "hy_v4", "ling3", "deepseek_v41"), "think"),
    **dict.fromkeys(("deepseek_r1", "step3", "minimax_m2", "olmo3", "holo2", "kimi_k2"), "always_think"),
    **dict.fromkeys(("cohere_command3", "cohere_command4"), "start_thinking"),
    "ernie45": "think_response",
    "gemma4": "channel",
    "openai_gptoss": "harmony",
    "granite": "thought_process",
    "hunyuan_a13b": "think_answer",
    "inkling": "typed_blocks",
    "kimi_k3": "open_close",
    "minimax_m2_append_think": "none",  # it leaves the reasoning in the text
    "minimax_m3": "minimax_m3",
    "mistral": "bracketed",
    "seed_oss": "seed_think",
    "solar_open2": "solar_open2",
}

UNREAD = ("k2_horizon", "muse_glimmer")
"""Parsers of vLLM, of calls and of reasoning alike, whose formats are not read."""

_GEMMA = tuple(f"Gemma4{kind}For{task}" for kind in ("", "Unified") for task in ("ConditionalGeneration", "CausalLM"))

ARCHITECTURES = {
    **dict.fromkeys(_GEMMA, ("gemma4", "gemma4")),
    "GptOssForCausalLM": ("openai", "openai_gptoss"),
    "ApertusForCausalLM": ("apertus", "apertus"),
    "Cohere2VisionForConditionalGeneration": ("cohere_command3", "cohere_command3"),
    "DeepseekV32ForCausalLM": ("deepseek_v32", "deepseek_v3"),
    "InternLM2ForCausalLM": ("internlm", "none"),
    "InternLM3ForCausalLM": ("internlm", "none"),
    "InternS1ForConditionalGeneration": ("internlm", "qwen3"),
    "KimiVLForConditionalGeneration": ("kimi_k2", "kimi_vl"),
    "Lfm2ForCausalLM": ("lfm2", "none"),
    "Lfm2VlForConditionalGeneration": ("lfm2", "none"),
    "Llama4ForConditionalGeneration": ("llama4_pythonic", "none"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "minimax_m2"),
    "MllamaForConditionalGeneration": ("llama3_json", "none"),
    "Olmo3ForCausalLM": ("olmo3", "none"),
    "SeedOssForCausalLM": ("seed_oss", "seed_oss"),
    "Step3VLForConditionalGeneration": ("step3", "step3"),
}
"""Parsers of tool calls and of reasoning for models whose chat template does not show them."""
