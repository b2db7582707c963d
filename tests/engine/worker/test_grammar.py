"""Structured outputs from random logits."""

import json
import math
import re
import threading
from pathlib import Path

import jsonschema
import pytest
import torch
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from sensorium.engine.core.codec import decode, encode
from sensorium.engine.structured_outputs import StructuredOutputsParams
from sensorium.engine.worker import grammar
from sensorium.engine.worker.grammar import GrammarFactory
from sensorium.engine.worker.sampler import sample
from sensorium.engine.worker.sampling_state import SamplingState, TokenRules
from sensorium.mm.media.isolate import CodecWorker, close_workers
from sensorium.processors.text.tokenizer import Tokenizer
from waiting import LONG

TINY = Path(__file__).resolve().parents[3] / "assets" / "tiny-vl"
TOKENIZER = Tokenizer(TINY)
FACTORY = GrammarFactory(TOKENIZER, seconds=LONG)
EOS = (349, 347)
VOCAB = TOKENIZER.vocab_size + 13  # models pad their vocabulary
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "total": {"type": "number", "minimum": 0, "maximum": 999},
        "paid": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "d"]}, "minItems": 1, "maxItems": 3},
        "place": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "total", "paid", "tags", "place"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": -9}},
                        "required": ["x"], "additionalProperties": False}},
}  # fmt: skip


DEEP = {}
for _ in range(5000):
    DEEP = {"not": DEEP}


def make_row(seed=0, tokens=(5, 6), factory=FACTORY, bad=(), **params):
    wanted = {name: params.pop(name) for name in list(params) if name in StructuredOutputsParams.__dataclass_fields__}
    made = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted), **params)
    return SamplingState(made, list(tokens), len(tokens), seed, TokenRules((*made.stop_ids, *EOS), bad, EOS), factory)


def answer(row, limit=400, most=VOCAB):
    """Sample until EOS from random logits. Some steps prefer low ids, because strings and numbers would never end otherwise."""
    gen = torch.Generator().manual_seed(row.seed)
    for _ in range(limit):
        (found,) = sample(torch.randn(1, VOCAB, generator=gen) * 3, [row])
        assert not isinstance(found, Exception), found
        row.token_ids.append(found.token)
        assert found.token < TOKENIZER.vocab_size, "beyond the tokenizer's vocabulary"
        if found.token in EOS:
            return TOKENIZER.decode(row.output_token_ids[:-1])
    raise AssertionError(f"no end: {TOKENIZER.decode(row.output_token_ids)!r}")


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_json_of_a_schema(start):
    for seed in range(start, start + 50):
        text = answer(make_row(seed, json=SCHEMA, frequency_penalty=0.5 * (seed % 2)))
        jsonschema.validate(json.loads(text), SCHEMA)
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False) or "\\" in text or "." in text


def test_whitespace_between_the_parts():
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    assert {answer(make_row(seed, json=schema)) for seed in range(8)} == {'{"a":true}', '{"a":false}'}
    spaced = {answer(make_row(seed, json=schema, whitespace="flexible")) for seed in range(20)}
    assert any(re.search(r"[{:]\s", text) for text in spaced)
    assert all(json.loads(text)["a"] in (True, False) for text in spaced)
    blank = make_row(1, json=schema, whitespace="flexible", logit_bias={TOKENIZER.encode(" ")[0]: 100.0})
    assert json.loads(answer(blank)), "a model that prefers whitespace comes to an end"


def test_regex():
    pattern = r"[A-Z]{2}-[0-9]{3}(x|yz)?"
    for seed in range(30):
        assert re.fullmatch(pattern, answer(make_row(seed, regex=pattern)))


def test_thousands_of_choices_of_any_text():
    choices = [*(f"class {i}" for i in range(5000)), "a|b", ".*", "/", "\x00\x7f", "#x y&&[~-]{2}$"]
    made = FACTORY.make(StructuredOutputsParams(choice=choices))
    for choice in (choices[0], *choices[-6:]):
        made.accept_tokens(TOKENIZER.encode(choice), 0)
        assert made.complete
        made.rollback(0)


def test_choice():
    choices = ["yes", "no", 'ma"ybe\\', "vielleicht ä\n"]
    assert {answer(make_row(seed, choice=choices)) for seed in range(60)} == set(choices)


def test_grammar():
    lark = 'start: item ("," item)~0..3\nitem: "a" | "(" item ")"'
    for seed in range(20):
        assert re.fullmatch(r"(\(*a\)*)(,\(*a\)*){0,3}", answer(make_row(seed, grammar=lark)))


def test_any_object():
    short = dict.fromkeys(range(VOCAB - 20), -3.0)
    short |= {TOKENIZER.encode(char)[0]: 3.0 for char in '"}'}
    for seed in range(10):
        assert isinstance(json.loads(answer(make_row(seed, json_object=True, logit_bias=short))), dict)


def test_min_tokens_and_ignore_eos_end_with_the_grammar():
    for seed in range(20):
        assert len(answer(make_row(seed, regex="[ab]+", min_tokens=12, temperature=0.1))) >= 12
        longer = make_row(seed, choice=["ab", "b"], min_tokens=50, max_tokens=99)
        assert answer(longer) in ("ab", "b"), "the grammar allows nothing but the end"
        assert len(answer(make_row(seed, regex="[ab]{1,9}", ignore_eos=True))) == 9


def test_bad_words_stop_tokens_and_bias_hold_within_the_grammar():
    b, x = (TOKENIZER.encode(char)[0] for char in "bx")
    assert answer(make_row(regex="[abc]{30}", bad=((b,),), logit_bias={b: 100.0, x: 100.0})).count("b") == 0
    (found,) = sample(torch.zeros(1, VOCAB), [make_row(regex="b", bad=((b,),))])
    assert "no token is allowed" in str(found)
    row = make_row(regex="[ab]{30}", stop_token_ids=[b], min_tokens=5, logprobs=1)
    for _ in range(5):
        (found,) = sample(torch.zeros(1, VOCAB), [row])
        row.token_ids.append(found.token)
        assert found.token != b, "too early"
        assert found.logprobs[found.token].logprob == pytest.approx(-math.log(VOCAB)), "of the raw logits"


@pytest.mark.parametrize("seed", range(10))
def test_the_grammar_follows_rollbacks_and_new_turns(seed):
    """After a rollback within the answer, the grammar continues at the kept tokens; in a new turn it starts again."""
    row = make_row(seed, json=SCHEMA)
    first = answer(row)
    keep = row.turn_start + (seed * 7) % len(first.encode())
    keep = min(keep, len(row.token_ids) - 1)
    begun = TOKENIZER.decode(row.token_ids[row.turn_start : keep])
    del row.token_ids[keep:]
    row.rollback(keep, row.turn_start)
    row.seed += 1
    again = answer(row)
    assert again.startswith(begun.rstrip("\ufffd"))
    jsonschema.validate(json.loads(again), SCHEMA)
    row.token_ids += [9, 9]
    row.rollback(len(row.token_ids) - 2, len(row.token_ids))
    jsonschema.validate(json.loads(answer(row)), SCHEMA)


def test_answers_share_only_the_compiled_grammar():
    rows = [make_row(seed, json=SCHEMA, n=4) for seed in range(4)]
    gen, open_ = torch.Generator().manual_seed(0), list(rows)
    for _ in range(400):
        for row, found in zip(open_, sample(torch.randn(len(open_), VOCAB, generator=gen), open_), strict=True):
            row.token_ids.append(found.token)
        open_ = [row for row in open_ if row.token_ids[-1] not in EOS]
        if not open_:
            break
    texts = {TOKENIZER.decode(row.output_token_ids[:-1]) for row in rows}
    assert len(texts) == 4
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"json": {"type": "strin"}}, "json cannot be used: Invalid type: strin"),
        ({"regex": "(("}, "regex cannot be used.*unclosed group"),
        ({"regex": "a(?=b)"}, "regex cannot be used"),
        ({"grammar": "start: nothing"}, "grammar cannot be used.*unknown name"),
        ({"json": {"$ref": "http://example.org/x"}}, "json cannot be used"),
        ({"json": {"$ref": "#"}}, "json cannot be used: no answer has this form"),
        ({"regex": r"[^\s\S]"}, "regex cannot be used: no answer has this form"),
        ({"regex": "a{1000000}"}, "regex cannot be used: lexer error.*smaller repetition counts"),
        ({"regex": "x(y|a{1000000})"}, "regex cannot be used: lexer error"),
        ({"grammar": "start: start"}, "grammar cannot be used: no answer has this form"),
    ],
)
def test_invalid_grammars_are_refused(wanted, message):
    with pytest.raises(InputError, match=message) as caught:
        FACTORY.check(StructuredOutputsParams(**wanted))
    assert "\n" not in str(caught.value)
    good, bad = make_row(choice=["a"]), make_row(**wanted)
    first, second = sample(torch.zeros(2, VOCAB), [bad, good])
    assert isinstance(first, InputError)
    assert TOKENIZER.decode([second.token]) == "a"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({}, "exactly one of .*found none"), ({"regex": "a", "choice": ["b"]}, "found regex, choice"),
        ({"choice": "ab"}, "list of strings"), ({"choice": []}, "is empty; give one string or more"),
        ({"choice": ["a", ""]}, "non-empty"),
        ({"regex": 5}, "regex=5"), ({"grammar": ""}, "grammar="), ({"json": "{"}, "is not JSON"),
        ({"json": "[1]"}, "JSON object"),
        ({"json": 5}, "json=5"), ({"json": {"a": object()}}, "is not a JSON schema"),
        ({"json": DEEP}, "is not a JSON schema"), ({"json_object": 2}, "True or False"),
        ({"json_object": True, "whitespace": "some"}, "whitespace"), ({"choice": ["\ud800"]}, "surrogate"),
        ({"regex": "\udfff"}, "surrogate"), ({"json": '{"title": "\ud800"}'}, "surrogate"),
    ],
)  # fmt: skip
def test_invalid_params(wanted, message):
    with pytest.raises(InputError, match=message):
        StructuredOutputsParams(**wanted)


def test_params_are_plain_data():
    class Model:
        @staticmethod
        def model_json_schema():
            return {"type": "object", "title": "M"}

    of_class, of_text = StructuredOutputsParams(json=Model), StructuredOutputsParams(json='{"type": "object", "title": "M"}')
    assert of_class == of_text
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert decode(encode(params)) == params
    with pytest.raises(InputError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_special_tokens_are_not_allowed_as_text():
    allowed, _ = FACTORY.make(StructuredOutputsParams(regex="(?s:.*)")).allowed_tokens(EOS, False, VOCAB)
    assert allowed.any()
    assert not allowed[sorted(TOKENIZER.all_special_ids)].any()


def chained_refs(count):
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "string"}}}}


def chained_rules(count):
    links = [f'r{i}: "a" r{i + 1}' for i in range(count)]
    return {"grammar": "\n".join(["start: r0", *links, f'r{count}: "b"'])}


def many_alternatives():
    choices = [{"type": "object", "properties": {f"a{j}": {"type": "string"}}} for j in range(30)]
    return {"json": {"type": "object", "properties": {f"k{i}": {"anyOf": choices} for i in range(100)}}}


@pytest.mark.parametrize("wanted", [chained_refs(1000), chained_rules(2800)], ids=["refs", "rules"])
def test_a_grammar_that_overflows_the_compilers_stack_is_refused_and_remembered(wanted, monkeypatch):
    params, factory = StructuredOutputsParams(**wanted), GrammarFactory(TOKENIZER, refuse_seconds=1000)
    with pytest.raises(InputError, match="compiling it crashed") as caught:
        factory.check(params)
    assert caught.value.info.param == f"structured_outputs.{params.form}"
    monkeypatch.setattr(grammar, "call_worker", None)
    with pytest.raises(InputError, match=r"refused for another 1?[0-9]{3} s"):
        factory.check(params)


def test_a_long_chain_of_refs_and_rules_still_compiles():
    for wanted in (chained_refs(100), chained_rules(200)):
        FACTORY.check(StructuredOutputsParams(**wanted))


def test_a_slow_grammar_is_refused(monkeypatch):
    monkeypatch.setattr(CodecWorker, "is_starved", lambda *_: False)  # whatever else the machine does now
    factory = GrammarFactory(TOKENIZER, seconds=0.02, refuse_seconds=0)
    with pytest.raises(InputError, match=r"took more than 0\.02 s"):
        factory.check(StructuredOutputsParams(**many_alternatives()))


def test_a_required_filter_of_system_calls_is_required_of_grammars_and_templates(monkeypatch):
    close_workers()
    monkeypatch.setattr(CodecWorker, "problem", property(lambda _: "old kernel", lambda *_: None), raising=False)
    params = SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(regex="a"))
    with LLM(TINY, max_model_len=512, media={"worker_sandbox": "require"}) as llm:
        found = llm.generate("hello", params, use_tqdm=False)
        found += llm.chat([{"role": "user", "content": "hi"}], chat_template="{{ messages[0].content }}", use_tqdm=False)
    assert ["(old kernel); set worker_sandbox" in one.error.message for one in found] == [True, True]


def test_slow_grammars_of_a_tenant_occupy_one_thread(monkeypatch):
    begun, go_on = [], threading.Event()

    def compile_slowly(self, params):
        begun.append(params.regex)
        assert params.regex == "quick" or go_on.wait(LONG)
        return params.regex, 0

    monkeypatch.setattr(GrammarFactory, "_compile", compile_slowly)
    factory = GrammarFactory(TOKENIZER)
    slow = [factory.begin(StructuredOutputsParams(regex=f"slow {i}"), "a") for i in range(3)]
    assert factory.begin(StructuredOutputsParams(regex="quick"), "b").result(LONG) == ("quick", 0)
    assert begun == ["slow 0", "quick"]
    go_on.set()
    assert [future.result(LONG)[0] for future in slow] == ["slow 0", "slow 1", "slow 2"]
    factory.close()


def test_hostile_grammars_beside_a_stream():
    """Grammars that crash the compiler, are slow or too large end their own requests; a stream goes on."""
    hostile = [chained_refs(1000), chained_rules(2800), {"regex": "a" * (1 << 18) + "b"}, many_alternatives()]
    with LLM(TINY, max_model_len=512, grammar_seconds=LONG) as llm:
        stream = llm.stream("hello", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
        next(stream)
        errors = [
            output.error
            for form in hostile
            for output in llm.generate(
                "hello", SamplingParams(max_tokens=1, structured_outputs=StructuredOutputsParams(**form)), use_tqdm=False
            )
        ]
        assert [error.code for error in errors[:3]] == ["invalid_input", "invalid_input", "over_limit"]
        assert [error.param for error in errors[:3]] == [
            "structured_outputs.json",
            "structured_outputs.grammar",
            "structured_outputs",
        ]
        assert "max_grammar_chars" in errors[2].message
        assert errors[3] is None
        assert [*stream][-1].error is None


def test_a_lexer_that_grows_late_ends_its_request_only():
    """The growth of a step is limited: without a limit on it, each of 64 answers could take 0.1 s of the same step."""
    grows = StructuredOutputsParams(regex="(qzx){10}b*a{1000000}")
    (token,) = TOKENIZER.encode("a", add_special_tokens=False)
    params = SamplingParams(temperature=0.0, max_tokens=200, logit_bias={token: 100.0}, structured_outputs=grows)
    with LLM(TINY, max_model_len=512, grammar_seconds=LONG) as llm:
        stream = llm.stream("user: say a", SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        next(stream)
        (grown,) = llm.generate("user: say b", params, use_tqdm=False)
        (again,) = llm.generate("user: say b", SamplingParams(max_tokens=4), use_tqdm=False)
        assert list(stream)[-1].error is None
    assert again.error is None
    assert grown.error is not None
    assert grown.error.code == "invalid_input"
    assert "the grammar cannot continue: lexer error: too many expressions" in grown.error.message, "before 50,000 states"
    assert "make it smaller" in grown.error.message
    assert len(grown.outputs[0].token_ids) >= 30, "it began"


def test_without_a_tokenizer():
    (found,) = sample(torch.zeros(1, VOCAB), [make_row(choice=["a"], factory=None)])
    assert "tokenizer" in str(found)


def test_the_grammar_cache_is_limited():
    factory = GrammarFactory(TOKENIZER)
    for i in range(70):
        factory.check(StructuredOutputsParams(choice=[str(i)]))
    assert len(factory._latest) == len(factory._alive) == 64
    assert factory._compiled(StructuredOutputsParams(choice=["69"])) is factory._compiled(
        StructuredOutputsParams(choice=["69"])
    )


def test_through_the_engine():
    """Requests: several answers, stop strings, no grammar, an invalid grammar, and an answer cut at max_tokens."""
    llm = LLM(TINY, max_model_len=256)

    def params(form, **more):
        return SamplingParams(max_tokens=80, seed=1, structured_outputs=StructuredOutputsParams(**form), **more)

    asked = [
        params({"regex": "[ab]{20}"}, n=3, ignore_eos=True),
        params({"regex": "a{4}-b{4}"}, stop=["-b"]),
        params({"regex": "(("}),
        SamplingParams(temperature=0.0, max_tokens=5),
        params({"regex": "[ab]{90}"}),
    ]
    several, stopped, broken, plain, late = llm.generate(["hello"] * 5, asked, use_tqdm=False)
    assert len({re.fullmatch("[ab]{20}", answer.text)[0] for answer in several.outputs}) == 3
    assert {answer.finish_reason for answer in several.outputs} == {"stop"}
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("aaaa", "-b")
    assert "regex cannot be used" in broken.error.message
    assert late.outputs[0].finish_reason == "length"
    (alone,) = llm.generate("hello", asked[3], use_tqdm=False)
    assert plain.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_vocabulary_of_bytes():
    """Tokens of mistral-common are bytes and may end inside a character."""
    import mistral_common

    tokenizer = Tokenizer(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json")
    grammar = GrammarFactory(tokenizer).make(StructuredOutputsParams(choice=["für", "第一"]))
    allowed, must_end = grammar.allowed_tokens((), True, tokenizer.vocab_size + 3)
    assert allowed[tokenizer.encode_ordinary("第一")[0]]
    assert not allowed[tokenizer.encode_ordinary("x")[0]]
    assert not must_end
    grammar.accept_tokens(tokenizer.encode_ordinary("第一"), 0)
    assert grammar.complete
    spelled = GrammarFactory(tokenizer).make(StructuredOutputsParams(regex="<s>.*|\\[INST\\].*"))
    allowed, _ = spelled.allowed_tokens((), True, tokenizer.vocab_size)
    assert allowed.any()
    assert not allowed[sorted(tokenizer.all_special_ids)].any(), "text that spells a special token is text"


START, END, PAD = "<|im_start|>", "<|im_end|>", "<|image_pad|>"


def tokens_of(text):
    return [TOKENIZER.decode([token], skip_special_tokens=False) for token in text]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"choice": [END]}, END),
        ({"choice": [f"{PAD}x"]}, f"{PAD}x"),
        ({"regex": r"<\|im_end\|>ab?"}, f"{END}a"),
        ({"json": {"const": START}}, f'"{START}"'),
        ({"grammar": f'start: "a{START}" "b"'}, f"a{START}b"),
    ],
)
def test_the_text_of_a_special_token_is_text(wanted, text):
    """It is written with ordinary tokens, as user text is; models read the special token as another thing."""
    row = make_row(**wanted)
    assert answer(row).startswith(text)
    assert not TOKENIZER.all_special_ids & set(row.output_token_ids[:-1])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f'start: {START} "ab" {PAD}', [START, "a", "b", PAD]),
        ('start: <[5]> "a"', ["&", "a"]),
        (f'start: "a" {END}', ["a"]),  # ends the answer, as after any grammar
        (f'start: "a" ({END} | "<|endoftext|>")', None),
        ("start: <|endoftext|>", []),
    ],
)
def test_special_tokens_of_grammars(source, expected):
    row = make_row(grammar=source)
    text = answer(row)
    found = tokens_of(row.output_token_ids[:-1])
    assert found == expected if expected is not None else text in ("a", "a<|endoftext|>")


def test_an_end_token_that_is_named_waits_for_min_tokens():
    """The answer ends before where the grammar allows nothing else."""
    loose = {answer(make_row(seed, grammar=f'start: "a" ({END} | "bcd" {END})')) for seed in range(12)}
    assert loose == {"a", "abcd"}
    assert {answer(make_row(seed, grammar=f'start: "a" ({END} | "bcd" {END})', min_tokens=3)) for seed in range(6)} == {"abcd"}
    assert answer(make_row(grammar=f'start: "a" {END}', min_tokens=3)) == "a"


def test_an_end_token_in_the_middle_is_an_error():
    row = make_row(grammar=f'start: "a" {END} "b"')
    with pytest.raises(AssertionError, match="the end token 349"):
        answer(row)


def test_unknown_special_tokens_are_named():
    reason = r"the tokenizer has no special token <\|nope\|>; it has <\|[a-z_]+\|>(, <\|[a-z_]+\|>)+$"
    with pytest.raises(InputError, match=reason):
        FACTORY.check(StructuredOutputsParams(grammar='start: <|nope|> "ab"'))
