"""vLLM's names of its tool-call parsers, and the format that each of them reads."""

OTHER_NAMES = {
    **dict.fromkeys(("hermes", "qwen3_coder", "qwen3_xml", "glm45", "glm47"), "tagged"),
    "mistral": "bracketed",
    "llama3_json": "python_tag",
    "kimi_k2": "sections",
}
