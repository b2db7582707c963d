"""Every message survives a round trip through bytes."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from sensorium.callers.errors import ErrorInfo
from sensorium.engine import core_info, outputs, pooling_requests, stats, types
from sensorium.engine.core.codec import decode, encode
from sensorium.engine.core_info import CoreInfo
from sensorium.engine.outputs import CompletionOutput, ItemTrace, RequestOutput
from sensorium.engine.pooling_requests import (
    CrossAttentionWeights,
    LayerStates,
    LikelyTokens,
    PromptClasses,
    PromptVector,
    SpokenPrompt,
    TokenClasses,
    TokenLogits,
    TokenVectors,
)
from sensorium.engine.sampling_params import SamplingParams
from sensorium.engine.stats import DraftStats, EngineStats, SequenceStats
from sensorium.engine.structured_outputs import StructuredOutputsParams
from sensorium.mm.fields import BatchedField, FieldElem, FlatField, SharedField
from sensorium.mm.types import EncodedItem, FramePlan, ItemGeometry, ItemPlan, MultiModalFeature, PlaceholderRange
from sensorium.processors.elements.element import Cell, Element, ImageScale
from sensorium.processors.elements.marked_text import MarkedText


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


def feature():
    kwargs = {
        "pixel_values": FieldElem(torch.randn(4, 3).to(torch.bfloat16), FlatField(dim=0)),
        "grid": FieldElem(torch.tensor([1, 2, 2]), BatchedField(keep_on_cpu=True)),
        "scale": FieldElem(0.5, SharedField()),
        "empty": FieldElem(torch.empty(0, 4, dtype=torch.uint8), FlatField(-1)),
        "name": FieldElem("x", SharedField()),
    }
    where = PlaceholderRange(3, 3, torch.tensor([False, True, False]))
    return MultiModalFeature("image", kwargs, where, ItemGeometry(1, 2, 2, 2, 0.5, (0.5,), 1, 3, (1, 2), True), "ab" * 32)


def messages():
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], logit_bias={4: 1.5}, bad_words=["x"], seed=2**63)
    request = types.EngineRequest(
        "r", (1, 2, 3), params, (7, 8), (feature(),), 1, 2**64 - 1, ((5, 6), (7,)), True, "salt", "lora", feature(),
        TokenLogits((3, 4)),
    )  # fmt: skip
    scheduled = types.ScheduledRequest("r", 0, 3, ((1, 2), (0,)), False, True, 5)
    update = types.RequestUpdate("r", 2, (4,), (feature(),), True, ((3, 4),))
    error = ErrorInfo("invalid_media", "image 0: e", "image", 0, "max_pixels")
    logprob = {3: types.Logprob(-0.5, 1, "x"), 4: types.Logprob(-1.5)}
    frames = FramePlan((0, 5), (0.0, 0.5), 10, 2.0, ((4, 5),), (9,))
    plan = ItemPlan("video", 1, (4, 6), (1, 2, 2), 3, 1, 64, False, frames, 9)
    item = ItemTrace("image", 0, 5, 6, 7, True, "disk", {"fetch": 0.5})
    marked = MarkedText("box_tokens", "<|box_start|>", (ImageScale((4, 6), (28, 28), 1),))
    completion = CompletionOutput(0, "t", (1,), (logprob,), -0.5, "stop", "x", marked)
    used = SequenceStats(16, 1, ("cache", "encoded"), (DraftStats("suffix", 2, (2, 1), (1, 0), 1),))
    encoded = types.EncodeResult("h", "disk", ErrorInfo("not_finite", "e"), True)
    done = types.TokenOutput("r", (1,), (logprob,), (None, logprob), "stop", 7, error, 2, {"queue": 0.5}, used, torch.ones(3))
    return [
        marked, Element("cup", "", (0.0, 1.0, 2.0, 3.0), ((0.5, 0.5),), (Cell(0, 1, "a"),)),
        error, params, request, scheduled, update, feature(),
        TokenLogits((3, 4)), LikelyTokens(5, 2), CrossAttentionWeights(((0, 1),)), SpokenPrompt((0.5, -1.0), 1.5, 7),
        LayerStates(2), TokenClasses(False),
        TokenVectors(True), PromptClasses(("last",), 1, False), PromptVector(("mean", "cls"), 2, False),
        types.EncodeTask("r", 0, "h"),
        types.StepHandle(3, True),
        StructuredOutputsParams(choice=["a"]),
        types.GrammarTask("r", StructuredOutputsParams(regex="a+"), "tenant"),
        types.WorkerUpdate((types.GrammarTask("r", StructuredOutputsParams(choice=["a"])),), ("q",)),
        types.GrammarResult("r", error),
        types.LoadedAdapter("lora:1", 100, 8),
        types.KVBlock(0, 3, b"h" * 32),
        types.KVLookup(4, (b"h" * 32,), ((True,), ()), ((0, 2),)),
        types.KVTransfer((types.KVBlock(0, 3, b"h" * 32),), (), (5,), ((4, (types.KVBlock(1, 2, b"g" * 32),)),), 0.5),
        types.KVLookupResult(4, ((0, 1),)),
        stats.TransferStats("KV blocks", "memory", 1, 2),
        types.SchedulerOutput(
            3, (scheduled,), (types.EncodeTask("r", 0, "h"),), (request,), (update,), ("q",), ("h",), ((1,),), True
        ),
        done, used, used.drafts[0], encoded, types.StepOutput((done,), (encoded,)), EngineStats(1, 2),
        CoreInfo(64, 4, 100, 8, 32, "float32", "cpu", ("a",), ("image",), True, True),
        types.CoreOutputs((done,), False, EngineStats(3)),
        completion,
        RequestOutput(
            "r", None, (1,), (completion,), (None, logprob), False, error, (plan,), {"decode": 1.0}, (item,), 3, 1,
            torch.ones(3),
        ),
        item,
        plan,
        EncodedItem("image", torch.ones(2, 3), (ItemGeometry(1, 2, 2, 2),), "ab" * 32, (4, 4)),
    ]  # fmt: skip


@pytest.mark.parametrize("message", messages(), ids=lambda message: type(message).__name__)
def test_round_trip(message):
    assert_same(message, decode(encode(message)))


def test_every_message_type_is_covered():
    covered = {type(message) for message in messages()} | {types.Logprob}
    modules = (types, stats, core_info, outputs, pooling_requests)
    assert {kind for module in modules for kind in vars(module).values() if is_dataclass(kind)} <= covered


def test_a_key_that_could_not_be_read_again_is_refused():
    for key in (TokenLogits((3, 4)), (1, 2)):
        with pytest.raises(TypeError, match="cannot be part of a message"):
            encode({"outer": {key: 1}})


def test_invalid_messages_are_refused():
    with pytest.raises(TypeError, match="function"):
        encode({"callback": lambda: None})


def test_an_engine_fed_through_bytes_gives_the_same(toy):
    """The worker gets decoded SchedulerOutputs and returns encoded StepOutputs, as in another process."""
    import random

    def run(through_bytes):
        core = toy.make_core(budget=7)
        if through_bytes:
            real = core.executor.runner.execute_model

            def execute_model(output, after=None):
                launched = real(decode(encode(output)), after)
                return replace(launched, get_output=lambda: decode(encode(launched.get_output())))

            core.executor.runner.execute_model = execute_model
        for i in range(5):
            request = toy.make_request(f"r{i}", random.Random(i), temperature=float(i % 2), logprobs=2)
            core.add(decode(encode(request)) if through_bytes else request)
        return {name: toy.tokens_of(outputs) for name, outputs in toy.drain(core).items()}

    assert run(True) == run(False)
