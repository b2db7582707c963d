"""`llm.embed` and `llm.score` against transformers: Qwen3-VL's last hidden state, and its logits of "yes" and "no"."""

from __future__ import annotations

import asyncio
import shutil

import family
import numpy as np
import pytest
import torch
from oracle import CHAT_TEMPLATE
from PIL import Image
from sensorium import LLM, AsyncLLM, Media
from sensorium.callers.errors import InputError
from sensorium.pipelines.embed import EMBED_INSTRUCTION, content_parts
from sensorium.pipelines.rank import SCORE_INSTRUCTION, SCORE_SYSTEM_PROMPT

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = family.save(family.load_rows()["qwen3_vl"], tmp_path_factory.mktemp("rank") / "model")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder, max_model_len=1024, max_num_seqs=4)


def make_image(seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (70, 90, 3), dtype=np.uint8))


def chat(system, user):
    turns = (("system", system), ("user", user))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def hidden(oracle, text, images=()):
    model, processor = oracle
    made = processor(text=[text], images=list(images) or None, return_tensors="pt")
    with torch.no_grad():
        return model.model(**made).last_hidden_state[0, -1].clone()


@pytest.fixture(scope="module")
def oracle(folder):
    return family.load(folder)


def test_vectors_are_the_oracles(llm, oracle):
    image = make_image()
    found = llm.embed(["a house", image, {"text": "a house", "image": [image, make_image(1)]}, "NULL"], use_tqdm=False)
    users = [
        ("a house", []),
        (PLACEHOLDER, [image]),
        (f"{PLACEHOLDER}{PLACEHOLDER}a house", [image, make_image(1)]),
        ("NULL", []),
    ]
    for one, (user, images) in zip(found, users, strict=True):
        assert one.error is None
        theirs = torch.nn.functional.normalize(hidden(oracle, chat(EMBED_INSTRUCTION, user), images), dim=-1)
        torch.testing.assert_close(one.vector, theirs, atol=2e-5, rtol=0)
        assert one.output.outputs[0].token_ids == []
    assert (found[0].vector @ found[1].vector) < 0.99


def test_scores_are_the_oracles(llm, oracle):
    yes, no = (llm.get_tokenizer().encode(word)[0] for word in ("yes", "no"))
    image = make_image()
    found = llm.score({"text": "what is it", "image": image}, ["a house", {"image": make_image(2)}], use_tqdm=False)
    begin = f"<Instruct>: {SCORE_INSTRUCTION}<Query>:{PLACEHOLDER}what is it\n<Document>:"
    for one, user, images in zip(found, ("a house", PLACEHOLDER), ([image], [image, make_image(2)]), strict=True):
        state = hidden(oracle, chat(SCORE_SYSTEM_PROMPT, begin + user), images)
        head = oracle[0].lm_head.weight.detach()
        assert one.error is None
        assert one.score == pytest.approx(float(torch.sigmoid((head[yes] - head[no]) @ state)), abs=2e-5)


def test_a_query_is_computed_once(llm):
    """Later documents of a query reuse its blocks and its image's encoder rows."""
    image, before = make_image(9), llm.stats
    one, two = (llm.embed({"image": image}, use_tqdm=False)[0] for _ in range(2))
    assert torch.equal(one.vector, two.vector)
    assert two.output.num_cached_tokens > 0
    assert llm.stats.encoder_calls == before.encoder_calls + 1


def test_forms_of_inputs(llm, tmp_path):
    make_image().save(tmp_path / "a.png")
    forms = [make_image(), {"image": str(tmp_path / "a.png")}, tmp_path / "a.png", {"image": [np.asarray(make_image())]}]
    found = llm.embed(forms, use_tqdm=False)
    vectors, whole = [one.vector for one in found], found[0].output.items[0].num_tokens
    assert all(torch.equal(vectors[0], other) for other in vectors[1:])
    small = Media(tmp_path / "a.png", max_pixels=1600)
    for one in (*llm.embed([small, {"image": [small]}]), *llm.score(small, "a house"), *llm.score("a house", small)):
        assert one.error is None
        assert one.output.items[0].num_tokens < whole
    ready = llm.embed({"prompt": chat(EMBED_INSTRUCTION, "a house")}, use_tqdm=False)[0]
    assert torch.equal(ready.vector, llm.embed("a house", use_tqdm=False)[0].vector)


def test_chat_template_argument(llm, folder, tmp_path):
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template.jinja"))
    bare = LLM(plain, max_model_len=1024, max_num_seqs=4)
    with pytest.raises(InputError, match="pass chat_template="):
        bare.embed("a house")
    given = {"chat_template": CHAT_TEMPLATE, "use_tqdm": False}
    (one,), (two,) = bare.embed("a house", **given), llm.embed("a house", use_tqdm=False)
    assert torch.equal(one.vector, two.vector)
    (one,), (two,) = bare.score("a house", make_image(), **given), llm.score("a house", make_image(), use_tqdm=False)
    assert one.score == two.score
    (one,), (two,) = bare.ocr(make_image(), max_tokens=4, **given), llm.ocr(make_image(), max_tokens=4, use_tqdm=False)
    assert one.error is None
    assert one.text == two.text


def test_dimensions(llm):
    (whole,), (short,) = (llm.embed("a house", dimensions=n, use_tqdm=False) for n in (None, 8))
    torch.testing.assert_close(short.vector, whole.vector[:8] / whole.vector[:8].norm())
    with pytest.raises(InputError, match="dimensions=65 must be between 1 and 64"):
        llm.embed("a house", dimensions=65)


def test_a_broken_input_fails_alone(llm):
    good, bad = llm.embed(["a house", {"image": b"no image"}], use_tqdm=False)
    assert good.error is None
    assert bad.vector is None
    assert bad.error.message.startswith("image 0: ")
    for ask in (llm.embed, lambda inputs: llm.score("a", inputs)):
        results = ask(["a house", {"picture": make_image()}, None, 5])
        errors = [one.error and one.error.message.partition(";")[0] for one in results]
        assert errors == [None, "an input has no key 'picture'", "an input is None", "an input is an int"]


def test_a_missing_value_of_a_table_is_named():
    with pytest.raises(InputError, match="an input is NaN"):
        content_parts(float("nan"))


@pytest.mark.parametrize(
    "empty", ["", {}, {"text": ""}, {"text": None, "image": None}, {"image": []}, {"text": ["", ""]}], ids=repr
)
def test_empty_inputs_are_refused(llm, empty):
    with pytest.raises(InputError, match="an input is empty; give a text"):
        llm.score(empty, "b")
    for one in (*llm.embed(empty), *llm.score("a", empty)):
        assert one.error.message.startswith("an input is empty; give a text")


def test_a_list_of_queries_needs_one_per_document(llm):
    queries, documents = ["a house", make_image()], ["a door", "a roof"]
    pairs = llm.score(queries, documents, use_tqdm=False)
    singles = [llm.score(query, document, use_tqdm=False)[0] for query, document in zip(queries, documents, strict=True)]
    assert [one.score for one in pairs] == pytest.approx([one.score for one in singles], abs=1e-6)
    assert pairs[0].score != pairs[1].score
    assert len(llm.score(["a house"], documents, use_tqdm=False)) == 2
    with pytest.raises(InputError, match="3 queries for 2 documents; give one query, or one for each document"):
        llm.score(["a", "b", "c"], documents)


def test_arguments_of_wrong_type_or_name(llm):
    for ask, said in (
        (lambda: llm.embed("a", instruction=5), "instruction=5 must be a string"),
        (lambda: llm.embed("a", dimensions="all"), "dimensions='all' must be an integer, 1 or above"),
        (lambda: llm.embed("a", dimensoins=4), "unknown argument 'dimensoins'; did you mean dimensions"),
        (lambda: llm.score("a", "b", chat_template=5), "chat_template=5 must be a string or a path or None"),
        (lambda: llm.score("a", "b", instructoin=""), "did you mean instruction"),
        (lambda: llm.ocr(make_image(), question=5), "question=5 must be a string"),
        (lambda: llm.ocr(make_image(), sampling_params={}), "sampling_params={} must be a SamplingParams or None"),
        (lambda: llm.ocr(make_image(), max_token=4), "did you mean max_tokens"),
    ):
        with pytest.raises(InputError, match=said):
            ask()


def test_vectors_are_the_same_beside_generation(llm):
    """Pooling requests and generating requests share steps."""
    alone = llm.embed("def f(x): return", use_tqdm=False)[0].vector
    jobs = [llm.request({"prompt": "import os"}), llm.request({"prompt": "def"})]
    llm.engine.loop.submit(jobs, lambda _: None)
    torch.testing.assert_close(llm.embed("def f(x): return", use_tqdm=False)[0].vector, alone, atol=1e-5, rtol=0)


def test_coroutines_give_the_same_results(llm):
    """They run concurrently, on an engine that also generates."""
    engine = AsyncLLM(llm, max_waiting=3)
    inputs = [f"import {name}" for name in "abcdefg"] + [make_image()]

    async def ask():
        work = (engine.embed(inputs), engine.score("a house", inputs[-3:]), engine.ocr([make_image(), b"broken"], max_tokens=4))
        return await asyncio.gather(*work)

    vectors, scores, pages = asyncio.run(ask())
    for one, two in zip(vectors, llm.embed(inputs, use_tqdm=False), strict=True):
        torch.testing.assert_close(one.vector, two.vector, atol=1e-5, rtol=0)
    expected = [one.score for one in llm.score("a house", inputs[-3:], use_tqdm=False)]
    assert [one.score for one in scores] == pytest.approx(expected, abs=1e-5)
    assert pages[0].text == llm.ocr(make_image(), max_tokens=4, use_tqdm=False)[0].text
    assert (pages[1].error.modality, pages[1].error.index) == ("image", 1)
    assert pages[1].error.message.startswith("it is not in a supported image format")


def test_a_wrong_input_of_a_coroutine_fails_alone(llm):
    engine, before = AsyncLLM(llm), llm.stats
    good, bad = asyncio.run(engine.embed(["a house", {"picture": make_image()}]))
    assert good.error is None
    assert bad.error.message.startswith("an input has no key 'picture'")
    assert llm.stats.encoder_calls == before.encoder_calls
    assert not llm.engine.loop._names


def test_scores_of_vllms_classifier_are_the_same(llm, folder):
    """vLLM serves Qwen3-VL-Reranker under another architecture, which `hf_overrides` names."""
    overrides = {"architectures": ["Qwen3VLForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    overrides["is_original_qwen3_reranker"] = True
    documents = ["a house", make_image(), {"text": "a tree", "image": make_image(1)}]
    expected = [one.score for one in llm.score("where?", documents, use_tqdm=False)]
    options = {"runner": "pooling", "convert": "classify", "hf_overrides": overrides}
    with LLM(folder, max_model_len=1024, max_num_seqs=4, **options) as classifier:
        assert [one.score for one in classifier.score("where?", documents, use_tqdm=False)] == expected
