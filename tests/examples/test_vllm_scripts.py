"""Scripts in the style of vLLM's examples run if only the import is changed; docs/coming-from-vllm.md is true."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import sensorium
import torch
from lora import write
from oracle import build_checkpoint
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.checkpoints.weight_files import file_headers
from sensorium.engine.vllm_args import IGNORED, NAMES, ONLY, RENAMED, SILENT

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "coming-from-vllm.md").read_text("utf-8")

BASIC = """
from vllm import LLM, SamplingParams

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=4, ignore_eos=True)

def main():
    llm = LLM(model=MODEL, tensor_parallel_size=1, gpu_memory_utilization=0.8, enforce_eager=True, trust_remote_code=True)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        RESULT.append((prompt, len(output.outputs[0].token_ids), generated_text))
        assert output.prompt_token_ids + output.outputs[0].token_ids
        assert output.encoder_prompt is None and output.finished

main()
"""

CHAT = """
from vllm import LLM, EngineArgs

def main(args: dict):
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 4
    sampling_params.temperature = 0.5
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay about the importance of higher education."},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    conversations = [conversation for _ in range(3)]
    outputs += llm.chat(conversations, sampling_params=sampling_params, use_tqdm=True, lora_request=None)
    RESULT.extend((output.prompt, output.outputs[0].finish_reason) for output in outputs)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert llm.generate([text], sampling_params)[0].prompt_token_ids == outputs[0].prompt_token_ids

main(vars(EngineArgs(model=MODEL, max_model_len=512, disable_log_stats=True)))
"""

VISION = """
from dataclasses import asdict
from typing import NamedTuple
from vllm import LLM, EngineArgs, SamplingParams

class ModelRequestData(NamedTuple):
    engine_args: EngineArgs
    prompts: list[str]
    stop_token_ids: list[int] | None = None

def run_qwen2_5_vl(questions, modality):
    engine_args = EngineArgs(
        model=MODEL,
        max_model_len=512,
        max_num_seqs=5,
        mm_processor_kwargs={"min_pixels": 28 * 28, "max_pixels": 1280 * 28 * 28},
        limit_mm_per_prompt={modality: 1},
    )
    prompts = [f"<|vision_start|><|image_pad|><|vision_end|>{question}" for question in questions]
    return ModelRequestData(engine_args=engine_args, prompts=prompts)

def main():
    req_data = run_qwen2_5_vl(["What is the content of this image?"], "image")
    default_limits = {"image": 0, "video": 0, "audio": 0}
    req_data.engine_args.limit_mm_per_prompt = default_limits | dict(req_data.engine_args.limit_mm_per_prompt or {})
    engine_args = asdict(req_data.engine_args) | {"seed": 0, "mm_processor_cache_gb": 0}
    llm = LLM(**engine_args)
    sampling_params = SamplingParams(temperature=0.2, max_tokens=4, stop_token_ids=req_data.stop_token_ids)
    inputs = [
        {
            "prompt": req_data.prompts[0],
            "multi_modal_data": {"image": IMAGE},
            "multi_modal_uuids": {"image": f"uuid_{i}"},
        }
        for i in range(2)
    ]
    outputs = llm.generate(inputs, sampling_params=sampling_params)
    for output in outputs:
        RESULT.append((output.outputs[0].text, output.error))

main()
"""

STRUCTURED = """
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 20
structured_outputs_params_choice = StructuredOutputsParams(choice=["Positive", "Negative"])
sampling_params_choice = SamplingParams(structured_outputs=structured_outputs_params_choice)
structured_outputs_params_regex = StructuredOutputsParams(regex=r"\\w{2,4}@\\w{2,4}\\.com\\n")
sampling_params_regex = SamplingParams(structured_outputs=structured_outputs_params_regex, stop=["\\n"], max_tokens=MAX_TOKENS)
json_schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
structured_outputs_params_json = StructuredOutputsParams(json=json_schema, disable_any_whitespace=True)
sampling_params_json = SamplingParams(structured_outputs=structured_outputs_params_json, max_tokens=MAX_TOKENS)

llm = LLM(model=MODEL, max_model_len=100)
for params in (sampling_params_choice, sampling_params_regex, sampling_params_json):
    RESULT.append(llm.generate("Classify this sentiment: vLLM is wonderful!", sampling_params=params)[0].outputs[0].text)
"""

MULTI_IMAGE = """
from vllm import LLM, EngineArgs, SamplingParams

question = "What is the content of each image?"
engine_args = EngineArgs(model=MODEL, max_model_len=512, max_num_seqs=5, limit_mm_per_prompt={"image": 2})
llm = LLM(**vars(engine_args) | {"seed": None})
placeholders = [{"type": "image", "image": image} for image in IMAGES]
messages = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": [*placeholders, {"type": "text", "text": question}]},
]
prompt = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
sampling_params = SamplingParams(temperature=0.0, max_tokens=4, stop_token_ids=None)
outputs = llm.generate({"prompt": prompt, "multi_modal_data": {"image": IMAGES}}, sampling_params=sampling_params)
parts = [{"type": "image_pil", "image_pil": image} for image in IMAGES]
chat = [messages[0], {"role": "user", "content": [*parts, {"type": "text", "text": question}]}]
outputs += llm.chat(chat, sampling_params=sampling_params, chat_template=None)
RESULT.extend((o.error, o.prompt_token_ids, o.outputs[0].text) for o in outputs)
"""

PREFIX_CACHING = """
from vllm import LLM, SamplingParams

prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. "
generating_prompts = [prefix + prompt for prompt in ("Hello, my name is", "The future of AI is")]
sampling_params = SamplingParams(temperature=0.0, max_tokens=4)
regular_llm = LLM(model=MODEL, max_model_len=512, gpu_memory_utilization=0.4, enable_prefix_caching=False)
regular = [output.outputs[0].text for output in regular_llm.generate(generating_prompts, sampling_params)]
del regular_llm
llm = LLM(model=MODEL, max_model_len=512, enable_prefix_caching=True, gpu_memory_utilization=0.4)
llm.generate(generating_prompts[0], sampling_params)
outputs = llm.generate(generating_prompts, sampling_params)
RESULT.append([output.outputs[0].text for output in outputs] == regular)
RESULT.append(outputs[0].num_cached_tokens > 0)
"""

BEAM_SEARCH = """
from vllm import LLM
from vllm.sampling_params import BeamSearchParams

llm = LLM(model=MODEL, max_model_len=128)
outputs = llm.beam_search([{"prompt": "Hello, my name is"}], BeamSearchParams(beam_width=3, max_tokens=4))
RESULT.extend(sequence.text for output in outputs for sequence in output.sequences)
"""

LORA = """
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

llm = LLM(model=MODEL, enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2, max_num_seqs=256)
sampling_params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
prompts = ["Hello, my name is", "The capital of France is"]
for request in (None, LoRARequest("sql-lora", 1, lora_path=ADAPTER), LoRARequest("sql-lora2", 2, lora_path=ADAPTER)):
    outputs = llm.generate(prompts, sampling_params, lora_request=request)
    RESULT.append([output.outputs[0].token_ids for output in outputs])
"""

POOLING = """
from vllm import LLM, PoolingParams

llm = LLM(model=MODEL, runner="pooling", max_model_len=512)
outputs = llm.embed(["Hello, my name is", "The president of the United States is"])
for output in outputs:
    embeds = output.outputs.embedding
    RESULT.append(len(embeds))
(output,) = llm.encode("Hello, my name is", pooling_task="embed", pooling_params=PoolingParams(dimensions=8))
RESULT.append(tuple(output.outputs.data.shape))
for output in llm.score("What is the capital of France?", ["The capital of Brazil is Brasilia.", "Paris."]):
    RESULT.append(output.outputs.score)
"""

AUDIO = """
from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import TextPrompt

engine_args = EngineArgs(model=MODEL, max_model_len=512, max_num_seqs=5, limit_mm_per_prompt={"audio": {"count": 1}})
llm = LLM.from_engine_args(engine_args)
inputs = TextPrompt(prompt="<|audio_bos|><|AUDIO|><|audio_eos|>What is recited?", multi_modal_data={"audio": [AUDIO]})
outputs = llm.generate(inputs, sampling_params=SamplingParams(temperature=0.2, max_tokens=4, detokenize=True))
RESULT.extend((o.error, len(o.outputs[0].token_ids)) for o in outputs)
"""

ASYNC = """
import asyncio
from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=MODEL, enforce_eager=True, max_model_len=100))
    final = None
    async for output in engine.generate("Hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), "request-1"):
        final = output
    RESULT.append((final.request_id, len(final.outputs[0].token_ids)))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    parts = [o.outputs[0].text async for o in engine.generate(request_id="stream", prompt="Hello", sampling_params=params)]
    RESULT.append("".join(parts) == final.outputs[0].text)
    assert (await engine.get_tokenizer()).eos_token and await engine.reset_prefix_cache() and not await engine.is_sleeping()
    engine.shutdown()

asyncio.run(main())
"""


def run(script: str, model: Path | str, **names: object) -> list:
    """Run a script with sensorium instead of vllm. Return what it appends to RESULT."""
    source = re.sub(r"^from vllm(\.\w+)* import", "from sensorium import", script, flags=re.M)
    assert "vllm import" not in source
    result: list = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exec(compile(source, "script", "exec"), {"MODEL": str(model), "RESULT": result, **names})
    return result


def test_basic(checkpoint):
    assert [entry[:2] for entry in run(BASIC, checkpoint)] == [("Hello, my name is", 4), ("The capital of France is", 4)]


def test_chat():
    found = run(CHAT, ROOT / "assets" / "tiny-vl")
    assert len(found) == 4
    assert "higher education" in found[0][0]
    assert {reason for _, reason in found} <= {"stop", "length"}


def test_vision(checkpoint):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8))
    assert [error for _, error in run(VISION, checkpoint, IMAGE=image)] == [None, None]


def test_structured(checkpoint):
    choice, regex, answer = run(STRUCTURED, checkpoint)
    assert choice in ("Positive", "Negative")
    assert re.fullmatch(r"\w{2,4}@\w{2,4}\.com", regex) or len(regex) > 4  # or cut at max_tokens
    assert isinstance(json.loads(answer)["ok"], bool)


def test_several_images():
    images = [Image.new("RGB", (60, 40), color) for color in ("red", "blue")]
    one, two = run(MULTI_IMAGE, ROOT / "assets" / "tiny-vl", IMAGES=images)
    assert one == two
    assert one[0] is None


def test_prefix_caching(checkpoint):
    assert run(PREFIX_CACHING, checkpoint) == [True, True]


def test_beam_search(checkpoint):
    texts = run(BEAM_SEARCH, checkpoint)
    assert len(texts) == 3
    assert all(text.startswith("Hello, my name is") for text in texts)


def test_adapters_per_request(checkpoint, tmp_path):
    layers = file_headers(checkpoint / "model.safetensors")
    name = next(name for name in layers if name.endswith("layers.0.self_attn.o_proj.weight"))
    outputs, inputs = layers[name].shape
    pair = torch.randn(4, inputs), torch.randn(outputs, 4)
    folder = write(tmp_path / "adapter", str(checkpoint), {name.removesuffix(".weight"): pair})
    plain, first, second = run(LORA, checkpoint, ADAPTER=str(folder))
    assert plain != first == second


def test_pooling(checkpoint):
    one, two, short, *scores = run(POOLING, checkpoint)
    assert one == two > 8
    assert short == (8,)
    assert all(0 <= score <= 1 for score in scores)
    assert len(scores) == 2


def test_audio(tmp_path):
    model = build_checkpoint(tmp_path / "audio", "qwen2_audio")
    assert run(AUDIO, model, AUDIO=(np.sin(np.arange(8000) / 9).astype(np.float32), 16_000)) == [(None, 4)]


def test_async(checkpoint):
    assert run(ASYNC, checkpoint) == [("request-1", 6), True]


# the table


def rows(section: str) -> list[list[str]]:
    body = DOC.split(f"## {section}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("| `")]
    assert cells
    return cells


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def resolve(path: str) -> object:
    """Return the object of a dotted name; a name in parentheses is a parameter."""
    path, _, parameter = path.partition("(")
    found: object = sensorium
    for part in path.split("."):
        fields = {field.name for field in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
        found = None if part in fields else getattr(found, part)
    if parameter:
        assert parameter.rstrip("=)") in inspect.signature(found).parameters, path
    return found


@pytest.mark.parametrize("row", rows("Classes and methods") + rows("Outputs"), ids=lambda row: row[0])
def test_names_of_the_table_exist(row):
    for name in names_in(row[1]):
        resolve(name)


def test_engine_arguments_of_the_table():
    honoured = {name for row in rows("Engine arguments that are honoured") for name in names_in(row[0])}
    assert honoured == NAMES - set(ONLY) - set(IGNORED) - set(SILENT) | {
        "hf_overrides",
        "override_generation_config",
        "chat_template",
        "ec_transfer_config",
    }
    ignored = {name: row[1] for row in rows("Engine arguments without effect") for name in names_in(row[0])}
    assert ignored == IGNORED | dict.fromkeys(SILENT, "silent")
    only = {name: row[2] for row in rows("Engine arguments that take certain values") for name in names_in(row[0])}
    assert only == {name: reason for name, (_, reason) in ONLY.items()}
    assert set(RENAMED) <= honoured


def test_sampling_parameters_of_the_table():
    known = set(inspect.signature(sensorium.SamplingParams).parameters)
    listed = {name: row[1] for row in rows("Sampling parameters") for name in names_in(row[0])}
    assert listed.keys() <= known
    values = {"best_of": 2, "truncate_prompt_tokens": 5, "logprob_token_ids": [1]}
    values |= {
        "flat_logprobs": True,
        "skip_reading_prefix_cache": True,
        "thinking_token_budget": 5,
        "routed_experts_prompt_start": 1,
    }
    refused = {name for name, state in listed.items() if state.startswith("refused")}
    assert refused == values.keys()
    for name, value in values.items():
        with pytest.raises(InputError, match=name):
            sensorium.SamplingParams(**{name: value})
