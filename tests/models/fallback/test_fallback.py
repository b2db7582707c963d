"""Classes of transformers without an implementation here, with our paged attention, against their own generate."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from threading import Barrier

import pytest
import torch
from fallbacks import BUILD, PLACEHOLDER, item, words
from sensorium import LLM, SamplingParams
from sensorium.cli.main import main
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.mm.fields import group_mergeable, merge
from sensorium.models.fallback.borrowed import STEP, PagedStep
from sensorium.models.fallback.peak import Peak
from sensorium.models.interface import ForwardBatch, StepLimits
from together import generate_together
from torch import nn
from waiting import LONG

TOKENS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def oracle(built):
    """Return a function from a family to (model, processor) of transformers, with its own attention."""
    import transformers as tf

    def load(family):
        processor = tf.AutoProcessor.from_pretrained(built(family))
        kind = type(BUILD[family](words(family))[0])
        return kind.from_pretrained(built(family), attn_implementation="eager").eval(), processor

    return cache(load)


SIZES = {"audioflamingo3": (20000, 9000, 61000)}
IMAGES = ((90, 130), (300, 60), (56, 56))
TEXTS = ("def f(x): {} return x", "import os\n{} and then the rest of it, as it stands", "{}class A: pass")


def prompts(family, seed=0):
    """Return a prompt for each size, a text-only one and, for images, one with three."""
    sizes, slot = SIZES.get(family, IMAGES), PLACEHOLDER.get(family, "<image>")
    name = "audio" if family == "audioflamingo3" else "image"
    items = [item(family, seed + i, size) for i, size in enumerate(sizes)]
    given = [(text.format(slot), [one]) for text, one in zip(TEXTS, items, strict=True)]
    several = [] if name == "audio" else [(f"a {slot} b {slot} and {slot} c", items)]
    return [{"prompt": text, "multi_modal_data": {name: several}} for text, several in (*given, *several, ("no item", []))]


def inputs_of(family, processor, prompt):
    """Process a prompt with the oracle's own processor."""
    ((name, items),) = prompt["multi_modal_data"].items()
    given = {"images" if name == "image" else "audio": items} if items else {}
    return dict(processor(text=[prompt["prompt"]], return_tensors="pt", **given))


def expected(oracle, family, prompt):
    """Return prompt tokens, greedy tokens and their log probabilities of transformers' own generate."""
    model, processor = oracle(family)
    made = inputs_of(family, processor, prompt)
    settings = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "eos_token_id": None}
    done = model.generate(**made, **settings, return_dict_in_generate=True, output_logits=True)
    start = made["input_ids"].shape[1]
    table = torch.stack(done.logits, 1)[0].float().log_softmax(-1)
    tokens = done.sequences[0, start:].tolist()
    return made["input_ids"][0].tolist(), tokens, table.amax(-1)


def check(outputs, wanted):
    for output, (ids, tokens, sure) in zip(outputs, wanted, strict=True):
        assert output.error is None
        assert list(output.prompt_token_ids) == ids
        answer = output.outputs[0]
        assert list(answer.token_ids) == tokens
        found = torch.tensor([entry[token].logprob for entry, token in zip(answer.logprobs, tokens, strict=True)])
        assert (found - sure).abs().max() < 2e-4


HOW = {"whole": {}, "chunked": {"max_num_batched_tokens": 7}, "preempted": {"max_num_batched_tokens": 40}}
TIGHT = {"aya_vision": 150_000}  # bytes of KV cache for one long sequence


@pytest.mark.parametrize("family", BUILD)
def test_tokens_are_those_of_the_class_itself(built, oracle, family):
    pairs = [(prompt, expected(oracle, family, prompt)) for prompt in prompts(family)]
    asked, wanted = zip(*sorted(pairs, key=lambda pair: len(pair[1][0])), strict=True)  # shortest first
    for how, options in HOW.items():
        room = TIGHT.get(family, 246_000) if how == "preempted" else None
        llm = LLM(built(family), max_model_len=240, max_num_seqs=8, kv_cache_memory_bytes=room, **options)
        check(generate_together(llm, asked, GREEDY), wanted)
        assert llm.stats.encoder_calls == len(IMAGES), "each item is encoded once, however many prompts contain it"
        assert how != "chunked" or llm.stats.cut_items > 0
        assert how != "preempted" or llm.stats.preemptions > 0
        alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in asked]  # with cached prefixes and encoder rows
        check(alone, wanted)
        assert llm.stats.prefix_hits > 0
        assert llm.stats.encoder_hits > 0


@pytest.mark.parametrize("family", BUILD)
def test_rows_of_an_item_do_not_depend_on_the_batch(built, family):
    llm = LLM(built(family), max_model_len=256)
    model, inputs = llm.engine.loop.core.executor.runner.model, llm.engine.inputs
    features = [inputs.process(prompt).features[0] for prompt in prompts(family)[:3]]
    with torch.inference_mode():
        alone = [model.embed_multimodal(f.modality, merge([f.kwargs]))[0] for f in features]
        for ids in group_mergeable([f.kwargs for f in features]):
            together = model.embed_multimodal(features[0].modality, merge([features[i].kwargs for i in ids]))
            assert all(torch.equal(alone[i], rows) for i, rows in zip(ids, together, strict=True))
    assert [len(rows) for rows in alone] == [f.range.length for f in features]


@pytest.mark.parametrize("family", BUILD)
def test_calls_that_overlap_do_not_meet(built, family):
    """Two threads run the same head; the decoder and an encoder run while another item is in the tower."""
    llm = LLM(built(family), max_model_len=256)
    model, feature = llm.engine.loop.core.executor.runner.model, llm.engine.inputs.process(prompts(family)[0]).features[0]
    hidden, both = torch.randn(2, 3, model.hidden_size), Barrier(2, timeout=LONG)

    def logits(i):
        with torch.inference_mode():
            return model.compute_logits(hidden[i])

    def wait(*_):
        both.wait()

    def rows():
        return model.embed_multimodal(feature.modality, merge([feature.kwargs]))[0]

    def meanwhile(*_):
        for hook in hooks:
            hook.remove()
        seen.extend((model._decode(inputs_embeds=hidden[:1], **{STEP: PagedStep()}), rows()))

    alone = [logits(0), logits(1)]
    hooks, seen = [model.outer.get_output_embeddings().register_forward_hook(wait)], []
    with ThreadPoolExecutor(2) as pool:
        assert all(map(torch.equal, pool.map(logits, (0, 1)), alone))
    hooks[0].remove()
    with torch.inference_mode():
        wanted = rows()
        inside = set(model.outer.get_decoder().modules())
        hooks = [
            m.register_forward_hook(meanwhile) for m in model.outer.modules() if isinstance(m, nn.Linear) and m not in inside
        ]
        assert torch.equal(rows(), wanted)
    assert torch.equal(seen[1], wanted)


@pytest.mark.parametrize("family", ["aya_vision", "ovis2", "video_llama_3", "glm4v_moe"])
def test_planned_tokens_are_those_of_the_processor(built, oracle, family):
    llm, slot = LLM(built(family), max_model_len=256), PLACEHOLDER.get(family, "<image>")
    for i, size in enumerate([(20, 20), (57, 56), (60, 500), (500, 61), (333, 217), (1000, 900)]):
        image = item(family, i, size)
        (plan,) = llm.plan({"prompt": slot, "multi_modal_data": {"image": [image]}})
        made = inputs_of(family, oracle(family)[1], {"prompt": slot, "multi_modal_data": {"image": [image]}})
        assert plan.num_tokens == made["input_ids"].shape[1], size


def test_audio_that_would_be_cut_is_refused(built):
    llm = LLM(built("audioflamingo3"), max_model_len=256)
    (output,) = llm.generate(
        {"prompt": "<sound>", "multi_modal_data": {"audio": [item("audioflamingo3", 0, 16000 * 11)]}}, GREEDY
    )
    assert "audio 0: it lasts 11.00 s" in output.error.message


def test_options_of_the_processor_are_the_callers(built):
    llm, image = LLM(built("aya_vision"), max_model_len=256), item("aya_vision", 0, (60, 200))
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": image}}
    many, few = (llm.plan(prompt, mm_processor_kwargs=options)[0] for options in (None, {"max_patches": 2}))
    assert few.num_tokens < many.num_tokens
    (refused,) = llm.generate({**prompt, "mm_processor_kwargs": {"max_patchez": 2}}, GREEDY, use_tqdm=False)
    assert "unknown processing option 'max_patchez'" in refused.error.message
    assert "max_patches" in refused.error.message
    (refused,) = llm.generate({**prompt, "mm_processor_kwargs": {"max_patches": 10**9}}, GREEDY, use_tqdm=False)
    assert "max_patches is 1000000000, more than 16 times the processor's own; give at most 64" in refused.error.message


def test_items_are_known_by_what_the_processors_files_say(built):
    from sensorium.processors.fallback.fallback import FallbackProcessingInfo
    from sensorium.processors.files import read_preprocessors

    files = read_preprocessors(built("aya_vision"))
    other = replace(files, image={**files.image, "max_patches": 3})
    keys = [FallbackProcessingInfo(one).options_key("image") for one in (files, files, other)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("family", ["aya_vision", "audioflamingo3"])
def test_half_precision(built, family):
    llm = LLM(built(family), max_model_len=256, dtype="bfloat16")
    assert all(output.error is None for output in llm.generate(prompts(family), GREEDY, use_tqdm=False))


def test_asleep_nothing_is_left_of_the_class(built):
    with LLM(built("ovis2"), max_model_len=256) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts("ovis2"), GREEDY, use_tqdm=False)]
        model = weakref.ref(llm.engine.loop.core.executor.runner.model)
        llm.sleep()
        assert model() is None
        assert all(part.is_meta for part in llm.engine.loop.core.executor.runner.model.outer.parameters())
        llm.wake_up()
        assert [output.outputs[0].token_ids for output in llm.generate(prompts("ovis2"), GREEDY, use_tqdm=False)] == wanted


@pytest.mark.full
def test_doctor_says_which_path_a_checkpoint_takes(built, checkpoint, capsys):
    assert main(["doctor", "--model", str(built("video_llama_3")), "--option", "max_model_len=256"]) == 0
    said = capsys.readouterr().out
    assert "fallback, transformers' VideoLlama3ForConditionalGeneration with our paged attention, because the registry" in said
    assert main(["doctor", "--model", str(checkpoint), "--option", "max_model_len=256"]) == 0
    assert "own implementation (sensorium.models.families.qwen2_vl.model)" in capsys.readouterr().out


@pytest.mark.parametrize("family", BUILD)
def test_planned_memory_of_a_step_is_what_it_takes(built, family):
    model, rows = LLM(built(family), max_model_len=256).engine.loop.core.executor.runner.model, 256
    slots, table = torch.arange(rows), torch.arange(rows // 16, dtype=torch.int32)[None]
    whole = AttentionMetadata((0, rows), (rows,), table, slots, 16)
    caches = [torch.zeros(2, rows // 16, 16, spec.kv_heads, spec.head_dim) for spec in model.cache_specs]
    attn = [replace(whole, window=spec.window) for spec in model.cache_specs]
    places, embeds = slots.expand(model.rope_axes, rows), torch.randn(rows, model.row_size)
    with torch.inference_mode(), Peak() as peak:
        model.forward(ForwardBatch(slots, places.clone(), attn, caches, slots, embeds))
    live = peak.most + embeds.nbytes + (3 + model.rope_axes) * slots.nbytes
    planned = model.forward_bytes(StepLimits(rows, rows, rows, torch.device("cpu")))
    slack = 1.5 if family == "glm4v_moe" else 1.1  # experts in float32 are measured in bfloat16 and doubled
    assert live <= planned * 1.01
    assert planned <= slack * live
