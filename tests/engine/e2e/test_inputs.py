"""Inputs through `LLM`: plans from headers, uuids, options, precomputed embeddings, `fit`, and the cache of processed items."""

from __future__ import annotations

import base64
import io
import time

import numpy as np
import pytest
import torch
from PIL import Image
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError, MediaError
from sensorium.engine.frontend.media import MultiModalProcessor
from sensorium.mm.media import image as image_module
from sensorium.mm.types import Media

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
CLIP_PLACEHOLDER = "<|vision_start|><|video_pad|><|vision_end|>"
CLIP = np.random.default_rng(9).integers(0, 256, (8, 60, 80, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, max_model_len=512, max_num_seqs=4)


def make_image(seed: int = 0, size: tuple[int, int] = (90, 70)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def ask(llm: LLM, *images: object, params: SamplingParams = GREEDY, **more: object):
    prompt = {"prompt": PLACEHOLDER * len(images) + "what", "multi_modal_data": {"image": list(images)}, **more}
    return llm.generate(prompt, params, use_tqdm=False)[0]


def test_the_plan_equals_the_tokens_of_the_answer(llm):
    media = {"image": [png(make_image(1)), make_image(2, (200, 56))], "video": (CLIP, {"fps": 4.0})}
    prompt = {"prompt": PLACEHOLDER + CLIP_PLACEHOLDER + PLACEHOLDER, "multi_modal_data": media}
    plans = llm.plan(prompt)
    assert [(plan.modality, plan.index, plan.size, plan.exact) for plan in plans] == [
        ("image", 0, (70, 90), True),
        ("image", 1, (56, 200), True),
        ("video", 0, (60, 80), True),
    ]
    assert plans[2].frames is not None
    assert plans[2].frames.timestamps == (0.0, 0.5, 1.0, 1.5)
    assert all(plan.bytes == plan.num_embeds * llm.engine.inputs.media.settings.row_bytes > 0 for plan in plans)
    assert llm.plan({"multi_modal_data": media}) == plans
    output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert output.error is None
    assert list(output.items) == plans
    pads = {llm.get_tokenizer().token_to_id(f"<|{name}_pad|>") for name in ("image", "video")}
    assert sum(token in pads for token in output.prompt_token_ids) == sum(plan.num_tokens for plan in plans)


def test_a_plan_decodes_nothing(llm, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr(image_module, "decode_image", refuse)
    whole = png(make_image(3))
    (plan,) = llm.plan({"multi_modal_data": {"image": whole}})
    assert llm.plan({"multi_modal_data": {"image": whole[:200]}}) == [plan]
    lazy = Image.open(io.BytesIO(whole))
    monkeypatch.setattr(lazy, "load", refuse)
    assert llm.plan({"multi_modal_data": {"image": lazy}}) == [plan]
    (fewer,) = llm.plan({"multi_modal_data": {"image": whole}}, mm_processor_kwargs={"max_pixels": 56 * 56})
    assert fewer.num_tokens < plan.num_tokens


def test_options_of_a_request_and_of_an_item(llm):
    image = make_image(4, (200, 200))
    default, small = ask(llm, image).items[0], ask(llm, image, mm_processor_kwargs={"max_pixels": 3136}).items[0]
    assert small.num_tokens == 4 < default.num_tokens
    mixed = ask(llm, Media(image, max_pixels=3136), image).items
    assert [plan.num_tokens for plan in mixed] == [4, default.num_tokens]
    both = ask(llm, Media(image, max_pixels=12544), image, mm_processor_kwargs={"max_pixels": 3136}).items
    assert [plan.num_tokens for plan in both] == [16, 4]
    frames = llm.plan({"multi_modal_data": {"video": [Media(CLIP, num_frames=4), CLIP]}})
    assert [len(plan.frames.indices) for plan in frames] == [4, 8]
    counted = llm.plan({"multi_modal_data": {"video": (CLIP, {"fps": 8.0})}}, mm_processor_kwargs={"num_frames": 6})
    assert len(counted[0].frames.indices) == 6  # it replaces the checkpoint's fps


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mm_processor_kwargs": {"max_pixel": 5}}, "unknown processing option 'max_pixel'; did you mean max_pixels?"),
        ({"multi_modal_data": {"image": Media(make_image(), fps=2.0)}}, "image 0: unknown processing option 'fps' for images"),
        ({"multi_modal_data": {"image": Media(make_image(), max_pixels=0)}}, "image 0: max_pixels is 0"),
        ({"multi_modal_data": {"image": Media(make_image(), detail="ultra")}}, "image 0: detail is 'ultra'"),
        ({"multi_modal_data": {"images": make_image()}}, "unknown modality 'images'; this model takes image"),
        ({"multi_modal_uuids": {"image": ["a", "b"]}}, "must have the same length as"),
        ({"cache_slat": "x"}, "unknown key 'cache_slat'"),
        ({"fit": "window"}, "fit"),
    ],
)
def test_unknown_options_are_refused(llm, change, reason):
    prompt = {"prompt": PLACEHOLDER, "multi_modal_data": {"image": make_image()}} | change
    with pytest.raises(Exception, match=reason):
        llm.plan(prompt)
    output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert output.error is not None
    assert output.outputs[0].finish_reason == "error"


def test_a_uuid_stands_for_its_content(llm):
    image = make_image(5)
    first = ask(llm, image, multi_modal_uuids={"image": ["cat"]})
    again = ask(llm, None, multi_modal_uuids={"image": ["cat"]})
    assert again.error is None
    assert again.outputs == first.outputs
    assert again.items == first.items
    assert "already stands for other content" in ask(llm, make_image(6), multi_modal_uuids={"image": ["cat"]}).error.message
    assert ask(llm, image, multi_modal_uuids={"image": ["cat"]}).outputs == first.outputs
    missed = ask(llm, None, multi_modal_uuids={"image": ["dog"]})
    assert "Cache miss for image at index 0 but data is not provided" in missed.error.message
    other = ask(llm, None, multi_modal_uuids={"image": ["cat"]}, mm_processor_kwargs={"max_pixels": 3136})
    assert "Cache miss for image at index 0" in other.error.message  # other options make it another item
    elsewhere = ask(llm, None, multi_modal_uuids={"image": ["cat"]}, cache_salt="tenant")
    assert "Cache miss for image at index 0" in elsewhere.error.message
    assert ask(llm, make_image(6), multi_modal_uuids={"image": ["cat"]}, cache_salt="tenant").error is None


def test_of_two_contents_with_one_uuid_the_later_one_fails(llm, monkeypatch):
    process, contents = MultiModalProcessor.process, (make_image(20), make_image(21, (60, 60)))

    def slow_first(self, item, *args):
        if item.plan.size == (70, 90):
            time.sleep(1)
        return process(self, item, *args)

    monkeypatch.setattr(MultiModalProcessor, "process", slow_first)
    given = [
        {"prompt": PLACEHOLDER, "multi_modal_data": {"image": one}, "multi_modal_uuids": {"image": ["both"]}}
        for one in contents
    ]
    first, second = llm.generate(given, GREEDY, use_tqdm=False)
    assert first.error is None
    assert "already stands for other content" in second.error.message


def test_a_uuid_may_be_given_to_a_cached_item(llm):
    image = make_image(13)
    first = ask(llm, image)
    assert ask(llm, image, multi_modal_uuids={"image": ["late name"]}).outputs == first.outputs
    assert ask(llm, None, multi_modal_uuids={"image": ["late name"]}).outputs == first.outputs


def test_a_uuid_is_not_bound_to_an_unreadable_item(llm):
    whole = png(make_image(7))
    assert ask(llm, whole[:-200], multi_modal_uuids={"image": ["late"]}).error is not None
    assert ask(llm, whole, multi_modal_uuids={"image": ["late"]}).error is None


def test_items_with_trusted_uuids_are_not_hashed(checkpoint, monkeypatch):
    llm = LLM(checkpoint, max_model_len=512, trust_uuid=True)
    first = ask(llm, make_image(8), multi_modal_uuids={"image": ["a"]})
    assert ask(llm, make_image(9), multi_modal_uuids={"image": ["a"]}).outputs == first.outputs
    assert ask(llm, make_image(9), multi_modal_uuids={"image": ["b"]}).items == first.items
    assert llm.mm_cache_stats.entries == 2


def test_the_same_request_at_any_hit_rate(checkpoint):
    images = [make_image(seed, (60 + 20 * seed, 80)) for seed in range(3)]
    cold = ask(LLM(checkpoint, max_model_len=512), *images)
    for warm_up in ((), (0,), (2, 1), (0, 1, 2)):
        llm = LLM(checkpoint, max_model_len=512)
        for index in warm_up:
            ask(llm, images[index])
        hits = llm.mm_cache_stats.hits
        got = ask(llm, *images)
        assert llm.mm_cache_stats.hits - hits == len(warm_up)
        assert (got.outputs, got.prompt_token_ids, got.items) == (cold.outputs, cold.prompt_token_ids, cold.items)


def test_a_small_cache_does_not_change_answers(checkpoint):
    llm = LLM(checkpoint, max_model_len=512, mm_processor_cache_bytes=1)
    first, second = ask(llm, make_image(1)), ask(llm, make_image(1))
    assert first.outputs == second.outputs
    assert (llm.mm_cache_stats.hits, llm.mm_cache_stats.entries) == (0, 0)


@pytest.mark.in_process
def test_precomputed_embeddings_give_the_answer_of_their_image(llm):
    image = make_image(10)
    want = ask(llm, image)
    made = llm.engine.inputs.process({"prompt": PLACEHOLDER, "multi_modal_data": {"image": image}})
    (feature,) = made.features
    tensors = {name: elem.data[None] if name == "image_grid_thw" else elem.data for name, elem in feature.kwargs.items()}
    with torch.inference_mode():
        (rows,) = llm.engine.loop.core.executor.runner.model.embed_multimodal("image", tensors)
    given = {"image_embeds": rows.clone(), "image_grid_thw": tensors["image_grid_thw"]}
    got = ask(llm, given)
    assert got.error is None
    assert (got.outputs, got.prompt_token_ids) == (want.outputs, want.prompt_token_ids)
    mixed = ask(llm, image, given)
    assert mixed.outputs == ask(llm, given, image).outputs == ask(llm, image, image).outputs
    assert "need their grids" in ask(llm, rows.clone()).error.message
    assert ask(llm, given, multi_modal_uuids={"image": ["rows"]}).outputs == want.outputs
    given["image_embeds"].zero_()  # this is the caller's memory
    assert ask(llm, None, multi_modal_uuids={"image": ["rows"]}).outputs == want.outputs
    given["image_embeds"].copy_(rows)
    assert "embeddings must have the shape" in ask(llm, {**given, "image_embeds": rows[:, 1:].clone()}).error.message


def test_fit_shrinks_media(checkpoint):
    llm = LLM(checkpoint, max_model_len=64, mm_processor_kwargs={"max_pixels": 400 * 300})
    big, small = make_image(11, (400, 300)), make_image(12, (60, 60))
    refused = ask(llm, big, small)
    assert "image 0: the prompt takes" in refused.error.message
    assert "fit" in refused.error.message
    with pytest.raises(MediaError, match="image 0: the prompt takes"):
        llm.plan({"prompt": PLACEHOLDER * 2, "multi_modal_data": {"image": [big, small]}})
    fitted = ask(llm, big, small, fit="context")
    assert fitted.error is None
    assert len(fitted.prompt_token_ids) + GREEDY.max_tokens <= 64
    before = [plan.num_tokens for plan in llm.plan({"multi_modal_data": {"image": [big, small]}})]
    assert [plan.shrunk_from for plan in fitted.items] == before
    assert all(plan.num_tokens <= was for plan, was in zip(fitted.items, before, strict=True))
    roomy = ask(llm, small, fit="context")
    assert roomy.items[0].shrunk_from is None
    clip = {"prompt": CLIP_PLACEHOLDER, "multi_modal_data": {"video": np.repeat(CLIP, 4, 0)}, "fit": "context"}
    output = llm.generate(clip, GREEDY, use_tqdm=False)[0]
    assert output.error is None
    assert output.items[0].shrunk_from > output.items[0].num_tokens
    crowd = ask(llm, *[small] * 20, fit="context")
    assert "cannot be made to fit" in crowd.error.message


def test_plan_and_generate_refuse_the_same_prompts(llm):
    with pytest.raises(MediaError, match=r"image 1: .*differ by more than 200:1"):
        llm.plan({"multi_modal_data": {"image": [make_image(), np.zeros((2, 500, 3), np.uint8)]}})
    with pytest.raises(
        InputError,
        match=r"image 0: the prompt has no placeholder for it; write <\|image_pad\|> once for each item",
    ):
        llm.plan({"prompt": "no placeholder", "multi_modal_data": {"image": make_image()}})


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(llm, monkeypatch):
    monkeypatch.setattr(llm.get_tokenizer(), "encode", lambda *_: pytest.fail("it was tokenised"))
    (output,) = llm.generate("x" * 10_000_000, GREEDY, use_tqdm=False)
    assert "max_model_len is 512" in output.error.message


def test_encoder_prompts_need_an_encoder(llm):
    (output,) = llm.generate([{"encoder_prompt": "a", "decoder_prompt": "b"}], GREEDY, use_tqdm=False)
    assert "no text encoder" in output.error.message


def test_message_parts_of_other_libraries_give_the_same_answer(llm, tmp_path):
    """The forms are those of data sets, transformers, OpenAI's Responses and qwen-vl-utils."""
    image = make_image(5)
    url = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    (tmp_path / "cat.png").write_bytes(png(image))
    own = [{"type": "image", "image": image}, {"type": "text", "text": "what"}]
    others = [
        [{"type": "image", "image": image, "text": None}, {"type": "text", "text": "what", "image": None}],
        [{"type": "image", "url": url}, "what"],
        [{"type": "image", "path": tmp_path / "cat.png"}, {"type": "text", "text": "what", "cache_control": {}}],
        [{"type": "image_url", "image_url": url}, {"text": "what"}],
        [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what"}],
        [{"type": "image_pil", "image_pil": image}, {"type": "refusal", "refusal": "what"}],
        [{"type": "image", "image": {"bytes": png(image), "path": None}}, {"type": "text", "text": "what"}],
        [{"type": "image", "image": io.BytesIO(png(image))}, {"type": "text", "text": "what"}],
    ]
    (want, *got) = llm.chat([[{"role": "user", "content": parts}] for parts in (own, *others)], GREEDY, use_tqdm=False)
    for output in (want, *got):
        assert output.error is None
        assert (output.outputs[0].text, output.prompt_token_ids) == (want.outputs[0].text, want.prompt_token_ids)


def test_a_list_of_frame_files_is_a_video(llm, tmp_path):
    for i in range(4):
        Image.fromarray(CLIP[i]).save(tmp_path / f"{i}.png")
    options = {"resized_height": 56, "resized_width": 84, "total_pixels": 1 << 20}
    files = {"type": "video", "video": [tmp_path / f"{i}.png" for i in range(4)], **options}
    frames = {"type": "video", "video": [*CLIP[:4]], "sample_fps": 2.0, **options}
    urls = {"type": "video", "video": [str(tmp_path / f"{i}.png") for i in range(4)]}
    a, b, c = llm.chat([[{"role": "user", "content": [part]}] for part in (files, frames, urls)], GREEDY, use_tqdm=False)
    assert a.error is b.error is None
    assert a.items[0].frames.timestamps == (0.0, 0.5, 1.0, 1.5)
    assert (a.items[0].grid, a.outputs[0].token_ids) == ((2, 4, 6), b.outputs[0].token_ids)
    assert c.error.message.endswith("allow a folder (media: allowed_local_media_path)")


def test_a_generator_gives_prompts_and_a_list_of_ids_is_one_prompt(llm):
    texts = llm.generate((text for text in ("one", "two")), GREEDY, use_tqdm=False)
    assert [output.prompt for output in texts] == ["one", "two"]
    ids = llm.get_tokenizer().encode("one")
    (output,) = llm.generate(ids, GREEDY, use_tqdm=False)
    assert output.outputs == texts[0].outputs
    talks = ([{"role": "user", "content": text}] for text in ("one", "two"))
    assert [output.error for output in llm.chat(talks, GREEDY, use_tqdm=False)] == [None, None]
    assert len(llm.ocr(path for path in ())) == 0
    for prompts, text in ((7, "not an int"), (b"one", "not a bytes"), (np.zeros(3), "not an ndarray")):
        with pytest.raises(InputError, match=f"prompts must be a string, a mapping or a list of them, {text}"):
            llm.generate(prompts, GREEDY)
