"""Published widths with few layers and random weights, against transformers: `make abridged ARGS="DIR --write"`.

If transformers has the class of a folder, a model is built with the widths of its config.json, two layers per stack (more if
the config names single layers) and random weights. Models are built one at a time and take 2 to 6.5 GB. For one item of each
modality, the encoder rows and the log probabilities of 8 greedy tokens are compared. If transformers has no processor for the
folder, or the folder has no tokenizer, only a prompt of tokens is compared.
"""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .__main__ import write_table

SECTION = "Published widths with few layers"
HEADER = [
    "folder",
    "parameters",
    "dtype",
    "prompt",
    "rows",
    "rows: largest difference",
    "tokens",
    "logprobs: largest difference",
]
TOKENS, LAYERS = 8, 2
TEXT = "The quick brown fox jumps over the lazy dog, and 123 other animals watch it."
MAX_FLOAT32 = 1_000_000_000  # parameters of a model in float32; larger ones are built in bfloat16
ROWS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # relative to the standard deviation of the rows
LOGPROBS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
_DEPTHS = ("num_hidden_layers", "encoder_layers", "depth", "num_layers")
_STACKED = ("deepstack_visual_indexes",)  # each of these layers has its own projector, so all are kept
_PER_LAYER = ("layer_types", "mlp_layer_types")


@dataclass(frozen=True)
class Answer:
    """One prompt's encoder rows, greedy tokens, and the log probabilities of all tokens at each step."""

    prompt: tuple[int, ...]
    rows: Tensor
    tokens: Sequence[int]
    logprobs: Sequence[Any]


def abridge(config: Any) -> None:
    """Cut every stack of a transformers config to a few layers, in place. Widths stay."""
    for section in [config, *(getattr(config, name, None) for name in type(config).sub_configs)]:
        if section is None:
            continue
        if section is not config:
            abridge(section)
        layers = LAYERS
        for name in _STACKED:
            count = len(getattr(section, name, None) or ())
            if count:
                layers = count + 1
                setattr(section, name, list(range(count)))
        if getattr(section, "fullatt_block_indexes", None):
            section.fullatt_block_indexes = [layers - 1]
        for name in _DEPTHS:
            if isinstance(section.__dict__.get(name), int):
                setattr(section, name, layers)
        for name in _PER_LAYER:
            if section.__dict__.get(name):
                setattr(section, name, section.__dict__[name][:layers])


def build(sides: Any, target: Path) -> tuple[Any, torch.dtype]:
    """Return transformers' abridged model with random weights, saved in `target` beside the folder's other files."""
    config = sides.their_config
    config.quantization_config = None
    abridge(config)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in sides.their_class(config).parameters())
    dtype = torch.float32 if count <= MAX_FLOAT32 else torch.bfloat16
    model = sides.their_class._from_config(config, dtype=dtype, attn_implementation="eager").eval()
    _randomise(model)
    for file in sides.folder.iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, target / file.name)
    model.save_pretrained(target)
    return model, dtype


def _randomise(model: Any) -> None:
    """Randomise weights in place, so that no copy of a large one is needed: matrices of gain 1, tables and heads of gain 2."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            gain = 2.0 if "lm_head" in name or "embed_tokens" in name else 1.0
            inputs = weight.shape[-1] if "experts" in name else weight[0].numel()  # one tensor holds all experts
            weight.data.normal_(0.0, gain / inputs**0.5, generator=generator)
        else:
            center = 1.0 if name.endswith("weight") and "norm" in name else 0.0
            weight.data.uniform_(center - 0.2, center + 0.2, generator=generator)


def theirs(model: Any, processor: Any, messages: Sequence[Mapping[str, Any]], data: Any, ids: Sequence[int]) -> Answer:
    """Answer with transformers. `ids`: placeholders whose embeddings are encoder rows."""
    from .checks import their_inputs

    inputs = their_inputs(processor, messages, data)
    for name, value in inputs.items():
        inputs[name] = value.to(model.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
    return generate(model, inputs, ids)


def generate(model: Any, inputs: Mapping[str, Any], ids: Sequence[int]) -> Answer:
    """Answer with transformers from a processor's tensors."""
    seen = list[Tensor]()

    def keep(_: Any, __: Any, options: Mapping[str, Any]) -> None:
        if not seen and options.get("inputs_embeds") is not None:
            seen.append(options["inputs_embeds"][0])

    hook = model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        found = model.generate(
            **inputs,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            repetition_penalty=1.0,
        )
    hook.remove()
    prompt = inputs["input_ids"][0]
    rows = seen[0][torch.isin(prompt, torch.tensor(ids))] if seen and ids else torch.empty(0)
    logprobs = [step[0].float().log_softmax(-1) for step in found.logits]
    return Answer(tuple(prompt.tolist()), rows.float(), [int(step.argmax()) for step in logprobs], logprobs)


def ours(folder: Path, dtype: torch.dtype, messages: Sequence[Mapping[str, Any]], data: Any) -> Answer:
    """Answer with sensorium: rows of an engine with the encoder only, tokens of one with the decoder only."""
    from sensorium import LLM, SamplingParams

    options: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cpu",
        "max_model_len": 4096,
        "max_num_seqs": 1,
    }
    with LLM(folder, parts="encoder", **options) as encoder:
        (output,) = encoder.encode_media({"multi_modal_data": data}, on_error="raise")
    encoded = list(output.encoded)
    for part in messages[0]["content"]:
        if part["type"] != "text":
            part[part["type"]] = encoded.pop(0)
    with LLM(folder, parts="decoder", generation_config="none", **options) as decoder:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)
        (answer,) = decoder.chat(messages, params, use_tqdm=False, on_error="raise")
        width = decoder.hidden_size
    rows = torch.cat([item.rows[:, :width] for item in output.encoded]).float()
    first = answer.outputs[0]
    return Answer(tuple(answer.prompt_token_ids), rows, list(first.token_ids), list(first.logprobs or ()))


def our_text(folder: Path, dtype: torch.dtype, ids: Sequence[int]) -> Answer:
    """Answer a text prompt with sensorium."""
    from sensorium import LLM, SamplingParams

    options: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": 1, "generation_config": "none"}
    with LLM(folder, parts="decoder", dtype=str(dtype).removeprefix("torch."), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=20)
        (answer,) = llm.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False, on_error="raise")
    first = answer.outputs[0]
    return Answer(tuple(answer.prompt_token_ids), torch.empty(0), list(first.token_ids), list(first.logprobs or ()))


def compare(want: Answer, got: Answer, dtype: torch.dtype) -> tuple[list[str], bool]:
    """Return the cells of one prompt, and whether both sides agree. Tokens are compared up to the first that differs."""
    cells, good = (
        [f"{len(want.prompt)} ids" if got.prompt == want.prompt else "differs", f"{len(got.rows)}"],
        got.prompt == want.prompt,
    )
    if got.rows.shape != want.rows.shape:
        return [*cells, f"{list(want.rows.shape)} for {list(got.rows.shape)}", "-", "-"], False
    rows = float((got.rows - want.rows).abs().max() / want.rows.std()) if len(want.rows) else 0.0
    same = next((i for i, pair in enumerate(zip(want.tokens, got.tokens, strict=True)) if pair[0] != pair[1]), TOKENS)
    steps = zip(want.logprobs[: same + 1], got.logprobs[: same + 1], strict=True)
    worst = max(abs(float(theirs[token]) - value.logprob) for theirs, values in steps for token, value in values.items())
    good = good and rows < ROWS_TOLERANCE[dtype] and worst < LOGPROBS_TOLERANCE[dtype]
    good = good and (same == TOKENS or dtype != torch.float32)
    return [*cells, f"{rows:.1e} std", f"{same} of {TOKENS} equal", f"{worst:.1e}"], good


def prompt_ids(sides: Any, target: Path) -> list[int]:
    """Return the tokens of a text. A folder without a tokenizer gets a small one in `target`, since an engine needs one."""
    from oracle import small_tokenizer

    from .sides import Missing

    try:
        return list(sides.tokenizer.encode(TEXT))
    except Missing:
        small = small_tokenizer(())
        small.save(str(target / "tokenizer.json"))
        return list(small.encode(TEXT).ids)


def check_folder(folder: Path, root: Path) -> list[tuple[list[str], int]]:
    """Return the rows of the table of one folder, one per modality, each with its number of differences."""
    from sensorium.callers.errors import SensoriumError

    from .checks import items, question
    from .sides import Missing, Sides, complete

    name = folder.relative_to(root).as_posix()
    with tempfile.TemporaryDirectory() as scratch:
        complete(folder, root, Path(scratch) / "published" / folder.name)
        sides, target = Sides(Path(scratch) / "published" / folder.name), Path(scratch) / folder.name
        target.mkdir()
        try:
            model, dtype = build(sides, target)
        except (Missing, SensoriumError) as why:
            return [([name, "-", "-", str(why).replace(scratch, ""), "-", "-", "-", "-"], 0)]
        size = f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.0f} M"
        cells = [name, size, str(dtype).removeprefix("torch.")]
        try:
            processor = sides.their_processor
            assert sides.template
        except Missing:
            prompt = prompt_ids(sides, target)
            ids = torch.tensor([prompt])
            text = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ())  # one may be the padding
            del model
            gc.collect()
            same, good = compare(text, our_text(target, dtype, prompt), dtype)
            return [([*cells, f"text, {same[0]}", *same[1:]], int(not good))]
        several = items(sides.info.modalities, sizes=2).values()
        cases = {kind: data for data in several for kind, values in data.items() if len(values) == 1}  # the larger size
        ids = list(sides.info.placeholder_ids.values())
        want = {kind: theirs(model, processor, [question(data)], data, ids) for kind, data in cases.items()}
        del model
        gc.collect()
        found = []
        for kind, data in cases.items():
            message = question(data)
            media = {part["type"]: [part[part["type"]]] for part in message["content"] if part["type"] != "text"}
            same, good = compare(want[kind], ours(target, dtype, [message], media), dtype)
            found.append(([*cells, f"{kind}, {same[0]}", *same[1:]], int(not good)))
    return found


def main(arguments: list[str] | None = None) -> int:
    return write_table(arguments, __doc__, SECTION, HEADER, check_folder)


if __name__ == "__main__":
    sys.exit(main())
