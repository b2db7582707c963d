"""An engine loop around the toy model of tests/engine/conftest.py, with letters as tokens and images as wide as their rows."""

from functools import partial
from types import MappingProxyType

import torch
from PIL import Image
from sensorium.callers.errors import InputError
from sensorium.engine.frontend.engine_loop import EngineLoop
from sensorium.engine.frontend.input_processor import InputProcessor
from sensorium.engine.frontend.media import MultiModalSettings
from sensorium.engine.frontend.request import RequestInput
from sensorium.engine.frontend.request_handle import RequestHandle
from sensorium.engine.frontend.serve import serve
from sensorium.engine.sampling_params import SamplingParams
from sensorium.mm.fields import BatchedField, FieldElem
from sensorium.mm.media.policy import DecodeSpec
from sensorium.mm.parse import MultiModalDataParser
from sensorium.mm.rules import CAUSAL
from sensorium.mm.types import ItemGeometry
from sensorium.processors.spans import build_span


class Letters:
    """Printable characters are the tokens 5 to 99; `@` is the image placeholder."""

    def encode(self, text, add_special_tokens=True):
        return [3 if letter == "@" else ord(letter) - 27 for letter in text]

    def min_tokens(self, text):
        return 0

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i + 27) for i in ids if i > 4)


class Info:
    """An image becomes as many rows as it is wide; a black one cannot be processed."""

    modalities, placeholder_ids, prompt_attention, decode_spec = ("image",), {"image": 3}, CAUSAL, DecodeSpec()
    cross_token = None
    adapters = text_placeholders = MappingProxyType({})
    adds_special_tokens = False

    def __init__(self):
        self.processed = []

    def parser(self):
        return MultiModalDataParser(self.modalities)

    def geometry(self, header):
        return ItemGeometry(1, 1, header.width)

    def kept_size(self, modality, size):
        return size

    def is_exact(self, header):
        return header.exact

    def process(self, item, dtype):
        value = int(item.pixels[0, 0, 0])
        self.processed.append(value)
        if value == 0:
            raise InputError("it is black; give one with light in it")
        rows = item.header.width
        tensors = {
            "seed": FieldElem(torch.tensor(value), BatchedField()),
            "rows": FieldElem(torch.tensor(rows), BatchedField()),
        }
        return tensors, self.geometry(item.header)

    def prompt_kwargs(self, items):
        return {}

    def preprocess_prompt(self, ids, items):
        return ids

    def span(self, modality, geometry):
        return build_span([geometry.num_embeds], 3)

    def spans(self, modality, geometries):
        return [self.span(modality, geometry) for geometry in geometries]

    def options_key(self, modality):
        return ""


def make_image(value, width=4):
    return Image.new("RGB", (width, 2), (value, 0, 0))


class ToyEngine:
    """An engine loop and an input processor around the toy model."""

    def __init__(self, toy, **options):
        self.toy, self.info = toy, Info()
        self.core = toy.make_core(**options)
        self.inputs = InputProcessor(self.info, Letters(), MultiModalSettings(limits={"image": 3}), 200)
        self.engine_loop = EngineLoop(self.core, Letters(), (toy.EOS,), seed=5)

    def requests(self, prompts, params=None):
        params = params or SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return [RequestHandle(RequestInput(partial(self.inputs.parse, prompt), params)) for prompt in prompts]

    def answers(self, prompts, params=None):
        found = dict(serve(self.engine_loop, self.requests(prompts, params)))
        self.toy.assert_empty(self.core)
        return [found[i] for i in range(len(prompts))]

    def texts(self, prompts, params=None):
        return [[answer.text for answer in output.outputs] for output in self.answers(prompts, params)]


PROMPTS = [
    "hello",
    {"prompt": "see @ there", "multi_modal_data": {"image": make_image(1)}},
    {"prompt": "@ and @", "multi_modal_data": {"image": [make_image(2), make_image(3, 6)]}},
    {"prompt_token_ids": [50, 51, 52]},
]
