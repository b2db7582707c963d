"""The checks of one published folder. Each compares one part with transformers and returns a `Cell`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from sensorium.checkpoints.weight_files import read_headers
from sensorium.engine.config import make_config
from sensorium.engine.frontend.input_processor import InputProcessor, ParsedPrompt
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.engine.model_files import ModelFiles
from sensorium.engine.setup.doctor import explain
from sensorium.engine.setup.implementation import is_fallback, resolve_architecture
from sensorium.engine.setup.model_source import ModelParts, build_model
from sensorium.engine.setup.resolve import load_processing
from sensorium.models.layers.linear import LmHead
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.template import load_template
from tokenizers import Tokenizer as fast
from torch import Tensor

from .sides import Missing, Sides, attempt, line

TEXTS = 500
MAX_LEN = 32768
FPS = 4.0
IMAGES = ((56, 84), (300, 500), (1300, 900))
VIDEOS = ((4, 84, 112), (8, 200, 160), (16, 300, 500))
AUDIO = (8_000, 47_999, 400_000)  # samples at 16 kHz
_RATE = 16_000
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name"}},
                "required": ["city"],
            },
        },
    }
]


@dataclass(frozen=True)
class Cell:
    """The result of one check.

    Args:
        text: the cell of the table.
        remark: what differs, or why nothing was compared.
        differs: True if a value differs from transformers', or if only transformers reads the folder.
    """

    text: str
    remark: str = ""
    differs: bool = False


def run(check: Callable[[Sides], Cell], sides: Sides) -> Cell:
    """Return the check's cell, or one that says why it could not compare."""
    try:
        return check(sides)
    except Missing as why:
        return Cell("-", str(why))
    except Exception as error:
        if isinstance(missing := attempt(lambda: sides.tokenizer), Missing) and str(error).startswith("no tokenizer.json"):
            return Cell("-", str(missing))
        return Cell("refused", line(error), differs=not isinstance(attempt(lambda: sides.their_class), Missing))


def check_files(sides: Sides) -> Cell:
    row = resolve_architecture(sides.files)
    return Cell(f"{sides.files.architecture}{', fallback' if is_fallback(row) else ''}")


def check_tokenizer(sides: Sides) -> Cell:
    """Compare the ids of TEXTS strings, with special tokens in them."""
    from vocabularies import texts

    ours = sides.tokenizer
    theirs = sides.their_tokenizer
    samples = texts(TEXTS, sorted(ours.specials)[:20])
    wrong = [text for text in samples if ours.encode(text) != list(theirs(text)["input_ids"])]
    if not wrong:
        return Cell(f"{TEXTS} equal")
    file = sides.folder / "tokenizer.json"
    if file.exists():  # transformers 5 follows the named class where it splits text otherwise than the file
        stored = fast.from_file(str(file))
        if all(ours.encode(text) == stored.encode(text).ids for text in samples):
            return Cell(f"{TEXTS} equal to the file", f"transformers' class splits {len(wrong)} otherwise than tokenizer.json")
    text = min(wrong, key=len)
    ids = f"{ours.encode(text)[:8]}, transformers {list(theirs(text)['input_ids'])[:8]}"
    return Cell(f"{len(wrong)} of {TEXTS} differ", f"{text!r} is {ids}".replace("|", "\\|"), differs=True)


def check_template(sides: Sides) -> Cell:
    """Compare the rendered text of chats with system, turns, tools, images, videos and audio."""
    template, processor = sides.template, attempt(lambda: sides.their_processor)
    renderer = sides.their_tokenizer if isinstance(processor, Missing) else processor
    if getattr(renderer, "chat_template", None) is None:
        raise Missing("transformers finds no chat template")

    def theirs(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        if tools and not load_template(template).reads.tools:
            raise ValueError("the template takes no tools")  # ours refuses them
        bare = [_read_as(load_template(template).reads.content, _bare(message)) for message in messages]
        text = str(renderer.apply_chat_template(bare, tools=tools, tokenize=False, add_generation_prompt=True))
        if not all(part.get("text", "").strip() in text for message in messages for part in _parts(message["content"])):
            raise ValueError("the template leaves out a text")  # which ours refuses
        return text

    def ours(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        return render_chat(messages, template, sides.tokenizer, tools=tools).text

    return _compare(chats(sides.info.modalities), ours, theirs)


def check_expansion(sides: Sides) -> Cell:
    """Compare the ids of prompts with one item of three sizes of each modality, and with two images."""
    processor, template = sides.their_processor, sides.template
    inputs = InputProcessor(sides.info, sides.tokenizer, MultiModalSettings(), MAX_LEN)

    def ours(messages: Sequence[Mapping[str, Any]], data: Any) -> list[int]:
        parsed = inputs.parse_chat(messages, {"template": template}, {})
        return list((parsed.finish() if isinstance(parsed, ParsedPrompt) else parsed).token_ids)

    texts = attempt(lambda: render_chat([question({})], template, sides.tokenizer))
    count = 0 if isinstance(texts, Exception) else 1  # a template may take no text of users
    cases = {name: ([question(data, count)], data) for name, data in items(sides.info.modalities).items()}
    return _compare(cases, ours, partial(_their_ids, processor))


def check_names(sides: Sides) -> Cell:
    """Compare the model with the names of the index, and with names and shapes of the tensors that transformers would save."""
    found, remarks = [], []
    headers = read_headers(sides.folder)
    if headers:
        _build(sides.files, sides)
        found.append(f"{len(headers)} of the index")
    theirs = attempt(lambda: their_headers(sides))
    if isinstance(theirs, Exception):
        remarks.append(line(theirs))
    else:
        model = _build(_wide(sides.files), sides)
        model.choose_head(theirs)
        model.check_weights(theirs)
        found.append(f"{len(theirs)} with shapes")
    return Cell(" and ".join(found) + " equal" if found else "-", "; ".join(remarks))


def check_plan(sides: Sides) -> Cell:
    """Compare the planned bytes of weights with those of transformers' class. Quantised weights are only reported."""
    quantized = sides.files.quantization_config is not None
    dtype = str(sides.files.dtype("auto")).removeprefix("torch.")  # a CPU may compute, and hold embeddings, in another one
    config = make_config(str(sides.folder), {"device": "cpu", "dtype": dtype, "max_model_len": 4096, "max_num_seqs": 4})
    plan = explain(config)
    text = f"{plan.total / 2**30:.2f} GiB, weights {plan.weights / 2**30:.2f}"
    if quantized:
        return Cell(text, "quantised: bytes of weights not compared")
    theirs = attempt(lambda: their_headers(sides))
    if isinstance(theirs, Exception):
        return Cell(text, "" if isinstance(theirs, Missing) else line(theirs))
    stored = read_headers(sides.folder) or theirs  # a publisher may leave tensors out, such as the head of an embedder
    size = sum(tensor.numel() for name, tensor in theirs.items() if name in stored) * sides.files.dtype("auto").itemsize
    model = _build(sides.files, sides)  # on a CPU, a tied head is held as a table and packed
    size += sum(head.packed_bytes(torch.device("cpu")) for head in model.modules() if isinstance(head, LmHead))
    differs = abs(plan.weights / size - 1) > 0.01
    return Cell(text, f"weights: transformers' take {size / 2**30:.2f} GiB" if differs else "", differs)


def their_headers(sides: Sides) -> Mapping[str, Tensor]:
    """Return names and shapes of the tensors that transformers' class saves, on the meta device, without quantisation."""
    from transformers.core_model_loading import revert_weight_conversion

    config = sides.their_config
    config.quantization_config = None
    with torch.device("meta"):
        model = sides.their_class(config)
    state = dict(model.state_dict())
    if (
        sides.files.config.get("tie_word_embeddings") is not False
    ):  # some classes tie even then, where the publisher stores a head
        for name in model.all_tied_weights_keys:
            state.pop(name, None)
    return cast(Mapping[str, Tensor], revert_weight_conversion(model, state))


def chats(modalities: Sequence[str]) -> dict[str, tuple[list[dict[str, Any]], Any]]:
    """Return name -> (messages, tools)."""
    hello = {"role": "user", "content": "Hello, who are you?"}
    system = {"role": "system", "content": "You are a helpful assistant."}
    turns = [hello, {"role": "assistant", "content": "I am a model."}, {"role": "user", "content": " And  now?\n"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    found: dict[str, tuple[list[dict[str, Any]], Any]] = {
        "text": ([hello], None),
        "text parts": (parts, None),
        "system": ([system, hello], None),
        "turns": (turns, None),
        "system and turns": ([system, *turns], None),
        "tools": ([hello], TOOLS),
        "system and tools": ([system, hello], TOOLS),
    }
    for name, data in items(modalities, sizes=1).items():
        ask = question(data)
        found[name] = ([ask], None)
        found[f"{name}, in a turn"] = ([system, ask, *turns[1:2], ask], None)
    return found


def items(modalities: Sequence[str], sizes: int = 3) -> dict[str, dict[str, list[Any]]]:
    """Return name -> media by modality: items of the first `sizes` sizes, and two images."""
    rng, found = np.random.default_rng(0), dict[str, dict[str, list[Any]]]()
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in IMAGES]
    if "image" in modalities or "vision_chunk" in modalities:
        found |= {f"image {one.height}x{one.width}": {"image": [one]} for one in images[:sizes]}
        found["two images"] = {"image": images[:2]}
    if "video" in modalities:
        videos = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in VIDEOS[:sizes]]
        found |= {f"video {len(one)}x{one.shape[1]}x{one.shape[2]}": {"video": [one]} for one in videos}
    if "audio" in modalities:
        audio = [rng.standard_normal(count).astype(np.float32) / 10 for count in AUDIO[:sizes]]
        found |= {f"audio of {len(one)} samples": {"audio": [one]} for one in audio}
    return found


def _compare(cases: Mapping[str, tuple[Any, Any]], ours: Callable[..., Any], theirs: Callable[..., Any]) -> Cell:
    """Call both functions with each case. Cases that both refuse count as equal."""
    wrong = []
    for name, case in cases.items():
        got, want = attempt(partial(ours, *case)), attempt(partial(theirs, *case))
        if got != want and not (isinstance(got, Exception) and isinstance(want, Exception)):
            wrong.append(f"{name}: {_shown(got)} for {_shown(want)}")
    return Cell(f"{len(wrong)} of {len(cases)} differ", "; ".join(wrong), True) if wrong else Cell(f"{len(cases)} equal")


def question(data: Mapping[str, Sequence[Any]], texts: int = 1) -> dict[str, Any]:
    content = [{"type": kind, kind: _ours(kind, value)} for kind, values in data.items() for value in values]
    return {"role": "user", "content": [*content, *[{"type": "text", "text": "What is this?"}] * texts]}


def _ours(kind: str, value: Any) -> Any:
    """Return media for a message part; every frame of a video is used, as in `_their_ids`."""
    return {"video": (value, {"fps": FPS, "do_sample_frames": False}), "audio": (value, _RATE)}.get(kind, value)


def _bare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose parts have no media."""
    content = message["content"]
    if not isinstance(content, str):
        content = [part if part["type"] == "text" else {"type": part["type"]} for part in content]
    return {**message, "content": content}


def _read_as(form: str, message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message to the form that the template reads, because transformers does not."""
    parts = _parts(message["content"])
    if form == "string" and any(part["type"] != "text" for part in parts):
        raise ValueError("the template takes no parts")
    forms = {"string": "\n".join(part.get("text", "") for part in parts), "parts": parts}
    return {**message, "content": forms.get(form, message["content"])}


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _their_ids(processor: Any, messages: Sequence[Mapping[str, Any]], data: Mapping[str, Sequence[Any]]) -> list[int]:
    return [int(number) for number in their_inputs(processor, messages, data)["input_ids"][0]]


def their_inputs(processor: Any, messages: Sequence[Mapping[str, Any]], data: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the outputs of transformers' processor, which adds BOS unless the template wrote it."""
    text = processor.apply_chat_template([_bare(message) for message in messages], tokenize=False, add_generation_prompt=True)
    bos, options = getattr(processor.tokenizer, "bos_token", None), dict[str, Any]()
    if bos and text.startswith(bos):
        options["add_special_tokens"] = False
    if "image" in data:
        options["images"] = list(data["image"])
    if "video" in data:
        metadata = [
            {"fps": FPS, "total_num_frames": len(one), "frames_indices": list(range(len(one)))} for one in data["video"]
        ]
        options |= {"videos": list(data["video"]), "video_metadata": metadata, "do_sample_frames": False}
    if "audio" in data:
        options |= {"audio": list(data["audio"]), "sampling_rate": _RATE}
    return dict(processor(text=[text], **options, return_tensors="pt"))


def _shown(value: Any) -> str:
    """Return ids by their number, a text by its start, and an error as one line."""
    if isinstance(value, Exception):
        return line(value)
    return f"{len(value)} ids" if isinstance(value, list) else repr(value[:160]).replace("|", "\\|")


def _build(files: ModelFiles, sides: Sides) -> Any:
    info = attempt(lambda: sides.info)
    if isinstance(info, Missing):
        info = load_processing(files, {})  # the adapters that it names need no tokenizer
    elif isinstance(info, Exception):
        raise info
    return build_model(files, info, files.dtype("auto"), torch.device("meta"), ModelParts(info.modalities))


def _wide(files: ModelFiles) -> ModelFiles:
    """Return the files without any sign of quantised weights, and without the index, which names these."""
    names = ("quantization_config", "compression_config")

    def without(part: Any) -> Any:
        return {key: without(value) for key, value in part.items() if key not in names} if isinstance(part, dict) else part

    return replace(files, path=files.path / "none", config=without(files.config))
