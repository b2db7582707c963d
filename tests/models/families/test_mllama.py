"""Cross-attention of Mllama: its weights cannot be returned, and a session keeps its image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import family
import pytest
from sensorium import LLM, PoolingParams, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.engine.setup import memory

ROWS_OF_IMAGE = 4 * 17
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.save(family.load_rows()["mllama"], tmp_path_factory.mktemp("models") / "mllama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, max_model_len=64, max_num_seqs=2)


def many_images(count: int, seed: int = 0) -> dict[str, object]:
    """Return a prompt of `count` different images with text between some of them."""
    images = [family.make_media("image", (60 + 20 * (i % 3), 50 + 30 * (i % 2)), 10 * seed + i) for i in range(count)]
    text = "".join("<|image|>" + (f" y{i} = " if i % 2 else "") for i in range(count))
    return {"prompt": f"<bos>def f{seed}(x):{text} return it", "multi_modal_data": {"image": images}}


@pytest.fixture
def prompt() -> dict[str, object]:
    image = family.make_media("image", (60, 50), 0)
    return {"prompt": "<bos>def f(x):<|image|> return it", "multi_modal_data": {"image": image}}


def test_cross_attention_weights_are_refused(llm: LLM, prompt: dict[str, object]) -> None:
    (output,) = llm.encode(prompt, PoolingParams(cross_attention=((0, 0),)), use_tqdm=False)
    assert output.error is not None
    assert (output.error.code, output.error.param) == ("invalid_input", "cross_attention")
    assert "leave it out" in output.error.message


def test_a_session_cannot_lose_its_image(llm: LLM, prompt: dict[str, object]) -> None:
    with llm.live(prompt, SamplingParams(temperature=0.0, max_tokens=3)) as session:
        before = session.answer().outputs[0].token_ids
        place = session.token_ids.index(llm.get_tokenizer().encode("<|image|>", False)[0])
        with pytest.raises(InputError, match=f"removes the image; truncate to {place + 1} or more"):
            session.truncate(place)
        assert session.answer().outputs[0].token_ids == before


@pytest.mark.parametrize("limit", [{"image": 6}, {}])
def test_a_prompt_may_have_as_many_images_as_the_options_say(
    folder: Path, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six images need more than the encoder cache has room for by default because of single items."""
    monkeypatch.setattr(memory, "_MIN_ENCODER_CACHE", 0)
    options = {"max_model_len": 6 * ROWS_OF_IMAGE, "max_num_seqs": 1}
    llm = LLM(folder, limit_mm_per_prompt=limit, **options)
    (output,) = llm.generate(many_images(6), GREEDY, use_tqdm=False)
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 24
    row_bytes = llm.explain().encoder_cache // (6 * ROWS_OF_IMAGE)
    small = LLM(folder, limit_mm_per_prompt=limit, encoder_cache_bytes=2 * ROWS_OF_IMAGE * row_bytes, **options)
    (refused,) = small.generate(many_images(3), GREEDY, use_tqdm=False)
    assert refused.error is not None
    assert (refused.error.code, refused.error.limit) == ("too_long", 136)
    assert "encoder_cache_bytes" in refused.error.message
    (output,) = small.generate(many_images(2), GREEDY, use_tqdm=False)
    assert output.error is None


def test_preempted_prompts_with_several_images_answer_the_same(folder: Path) -> None:
    """The cache holds the tokens of one sequence: others lose their blocks, and write their encoder rows again."""
    prompts, long = [many_images(count, seed) for seed, count in enumerate((2, 2, 3, 1))], replace(GREEDY, max_tokens=60)
    roomy = LLM(folder, max_num_seqs=1, max_model_len=256, block_size=4)
    alone = [roomy.generate(prompt, long, use_tqdm=False)[0] for prompt in prompts]
    longest = max(len(output.prompt_token_ids) for output in alone) + 60
    counts = {"cross": ROWS_OF_IMAGE, "full": -(-longest // 4)}  # blocks of four images and of one sequence
    room = sum(spec.block_bytes(4) * counts[spec.kind] for spec in roomy.engine.loop.core.executor.runner.model.cache_specs)
    options = {"limit_mm_per_prompt": {"image": 4}, "max_num_batched_tokens": 16, "block_size": 4}
    llm = LLM(folder, max_num_seqs=4, kv_cache_memory_bytes=room, max_model_len=longest, **options)
    outputs = llm.generate(prompts, long, use_tqdm=False)
    assert llm.stats.preemptions > 0
    for output, expected in zip(outputs, alone, strict=True):
        assert output.error is expected.error is None
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
