"""A driver around the toy model of tests/engine/conftest.py, with letters for tokens and pictures as wide as their rows."""

from functools import partial
from types import MappingProxyType

import torch
from PIL import Image
from sensorium.engine.driver import Driver
from sensorium.engine.input import InputProcessor
from sensorium.engine.media import MediaSettings
from sensorium.engine.sampling_params import SamplingParams
from sensorium.engine.ticket import Job
from sensorium.mm.errors import InputError
from sensorium.mm.fields import BatchedField, FieldElem
from sensorium.mm.media.policy import DecodeSpec
from sensorium.mm.parse import MultiModalDataParser
from sensorium.mm.types import ItemGeometry
from sensorium.processors.interface import Span


class Letters:
    """Printable characters are the tokens 5 to 99; `@` is the picture's slot."""

    def encode(self, text, add_special_tokens=True):
        return [3 if letter == "@" else ord(letter) - 27 for letter in text]

    def least_tokens(self, text):
        return 0

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i + 27) for i in ids if i > 4)


class Info:
    """A picture becomes as many rows as it is wide; a black one cannot be processed."""

    modalities, slot_ids, prefill, decode_spec = ("image",), {"image": 3}, "causal", DecodeSpec()
    adapters = MappingProxyType({})

    def __init__(self):
        self.processed = []

    def parser(self):
        return MultiModalDataParser(self.modalities)

    def geometry(self, header):
        return ItemGeometry(1, 1, header.width)

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

    def prompt_ids(self, ids, items):
        return ids

    def span(self, modality, geometry):
        return Span((3,) * geometry.num_embeds)

    def spans(self, modality, geometries):
        return [self.span(modality, geometry) for geometry in geometries]

    def options_key(self, modality):
        return ""


def picture(value, width=4):
    return Image.new("RGB", (width, 2), (value, 0, 0))


class World:
    def __init__(self, toy, **options):
        self.toy, self.info = toy, Info()
        self.core = toy.make_core(**options)
        self.inputs = InputProcessor(self.info, Letters(), MediaSettings(limits={"image": 3}), 200)
        self.driver = Driver(self.core, Letters(), (toy.EOS,), seed=5)

    def jobs(self, prompts, params=None):
        params = params or SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return [Job(partial(self.inputs.begin, prompt), params) for prompt in prompts]

    def answers(self, prompts, params=None):
        found = dict(self.driver.serve(self.jobs(prompts, params)))
        self.toy.assert_empty(self.core)
        return [found[i] for i in range(len(prompts))]

    def texts(self, prompts, params=None):
        return [[answer.text for answer in output.outputs] for output in self.answers(prompts, params)]


PROMPTS = [
    "hello",
    {"prompt": "see @ there", "multi_modal_data": {"image": picture(1)}},
    {"prompt": "@ and @", "multi_modal_data": {"image": [picture(2), picture(3, 6)]}},
    {"prompt_token_ids": [50, 51, 52]},
]
