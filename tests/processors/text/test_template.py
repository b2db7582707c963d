"""Chat templates: a caller's text never becomes a control token, whatever the template does to it; limits of templates."""

from __future__ import annotations

import contextlib
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import measured
import pytest
from jinja2 import nodes
from jinja2.visitor import NodeTransformer
from oracle import CHAT_TEMPLATE
from sensorium.callers.errors import BusyError, CheckpointError, InputError
from sensorium.models.families.internvl.processing import TEMPLATES
from sensorium.processors.files import find_template
from sensorium.processors.text.chat import render_chat
from sensorium.processors.text.tekken import tekken_template
from sensorium.processors.text.template import Sandbox
from sensorium.processors.text.template_text import TemplateText
from sensorium.processors.text.tokenizer import Tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = [
    file.parent
    for parent in (ROOT / "assets", ROOT.parent / "shared" / "data" / "published")
    for file in sorted(parent.glob("**/tokenizer_config.json"))
]
CONTROL = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<tool_call>", "</think>", "<s>", "[INST]", "[/INST]", "<image>", "@"]


def bytes_tokenizer(folder: Path, added: dict[str, bool]) -> Tokenizer:
    """A tokenizer of bytes with these added tokens, special or not."""
    fast = Fast(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for content, special in added.items():
        fast.add_tokens([AddedToken(content, special=special, normalized=False)])
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def published(folder: Path, tmp_path: Path) -> Tokenizer:
    """Return the published tokenizer, or a tokenizer of bytes with its added tokens."""
    if (folder / "tokenizer.json").is_file():
        return Tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    listed = config.get("added_tokens_decoder", {}).values()
    return bytes_tokenizer(tmp_path, {token["content"]: token["special"] for token in listed} or dict.fromkeys(CONTROL, False))


SOURCES = {
    **{f"internvl {name}": text for name, text in TEMPLATES.items()},
    "tekken v3": tekken_template({"config": {"version": "v3"}}),
    "tekken v7": tekken_template({"config": {"version": "v7"}}),
    "tiny": CHAT_TEMPLATE,
    **{str(folder): find_template(folder) for folder in FOLDERS},
}
SOURCES = {name: text for name, text in SOURCES.items() if text}


def call(value: nodes.Expr, method: str, *args: str) -> nodes.Expr:
    return nodes.Call(nodes.Getattr(value, method, "load"), [nodes.Const(arg) for arg in args], [], None, None)


def filtered(value: nodes.Expr, name: str, *args: str) -> nodes.Expr:
    return nodes.Filter(value, name, [nodes.Const(arg) for arg in args], [], None, None)


# name -> what a template does to a text, and a text that becomes the token by it
CHANGES = {
    "nothing": (lambda x: x, lambda token: token),
    "lower": (lambda x: filtered(x, "lower"), str.upper),
    "upper": (lambda x: call(x, "upper"), str.lower),
    "swap": (lambda x: call(x, "swapcase"), str.swapcase),
    "replace": (lambda x: filtered(x, "replace", "~", ""), lambda token: f"{token[:2]}~{token[2:]}"),
    "method": (lambda x: call(x, "replace", "~", ""), lambda token: f"{token[:1]}~{token[1:]}"),
    "split and join": (lambda x: filtered(call(x, "split", "~"), "join"), lambda token: "~".join(token)),
    "letters": (lambda x: filtered(filtered(x, "list"), "join"), lambda token: token),
    "reversed": (lambda x: filtered(x, "reverse"), lambda token: token[::-1]),
    "around": (lambda x: nodes.Concat([nodes.Const("<|"), x, nodes.Const("|>")]), lambda token: token[2:-2]),
    "before": (lambda x: nodes.Add(nodes.Const("<"), x), lambda token: token[1:]),
    "after": (lambda x: nodes.Add(filtered(x, "trim"), nodes.Const(">")), lambda token: f" {token[:-1]} "),
    "format": (lambda x: nodes.Mod(nodes.Const("<|%s|>"), x), lambda token: token[2:-2]),
    "field": (
        lambda x: nodes.Call(nodes.Getattr(nodes.Const("<|{}|>"), "format", "load"), [x], [], None, None),
        lambda t: t[2:-2],
    ),
    "joined": (
        lambda x: nodes.Call(
            nodes.Getattr(nodes.Const("|"), "join", "load"), [nodes.List([nodes.Const("<"), x])], [], None, None
        ),
        lambda t: t[2:],
    ),
    "replaced inside": (lambda x: nodes.Concat([nodes.Const("<"), filtered(x, "replace", "(", "")]), lambda t: f"({t[1:]}"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_no_text_becomes_control_whatever_the_template_does(name, tmp_path, monkeypatch):
    tok = published(Path(name), tmp_path) if "/" in name else bytes_tokenizer(tmp_path, dict.fromkeys(CONTROL, False))
    real = Sandbox._parse
    monkeypatch.setattr(
        "sensorium.processors.text.rendering._check_texts", lambda *_: None
    )  # which refuses most of the changes
    for change, (wrap, disguise) in CHANGES.items():
        monkeypatch.setattr(Sandbox, "_parse", lambda self, *args, wrap=wrap: Changed(wrap).visit(real(self, *args)))
        source = f"{SOURCES[name]}{{# {change} #}}"
        texts = [disguise(token) for token in tok.control if len(token) > 4]
        for text in (" ".join(texts), *texts[:10]):
            attack, harmless = (control_ids(words, source, tok) for words in (text, "x" * len(text)))
            assert attack == harmless, (change, text[:80])


class Changed(NodeTransformer):
    """Puts an expression around every text of a message in a template."""

    def __init__(self, wrap):
        self.wrap = wrap

    def visit_Getattr(self, node):
        self.generic_visit(node)
        return self.wrapped(node) if node.attr in ("content", "text") else node

    def visit_Getitem(self, node):
        self.generic_visit(node)
        named = isinstance(node.arg, nodes.Const) and node.arg.value in ("content", "text")
        return self.wrapped(node) if named else node

    def wrapped(self, node):
        changed = nodes.CondExpr(nodes.Test(node, "string", [], [], None, None), self.wrap(node), node)
        for inner in (changed, *changed.find_all(nodes.Node)):
            inner.lineno, inner.environment = node.lineno, node.environment
        return changed


def control_ids(text: str, source: str, tok: Tokenizer) -> list[int]:
    try:
        chat = render_chat([{"role": "user", "content": text}], source, tok)
    except InputError:  # templates that take parts only
        chat = render_chat([{"role": "user", "content": [{"type": "text", "text": text}]}], source, tok)
    assert chat.text
    control = set(tok.control.values())
    return [number for number in tok.encode_pieces(chat.segments) if number in control]


TALK = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "  What < is > {this}? \U0001f680\n\n"},
    {"role": "assistant", "content": "A thing. "},
    {"role": "user", "content": "And\u00a0that?"},
]


@pytest.mark.parametrize("name", [name for name in SOURCES if "/" in name])
@pytest.mark.parametrize("parts", [False, True])
def test_prompts_of_published_templates_equal_transformers(name, parts, tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    tok = published(Path(name), tmp_path)
    talks = [TALK, TALK[1:], TALK[1:2]]
    if parts:
        talks = [[{**one, "content": [{"type": "text", "text": one["content"]}]} for one in talk] for talk in talks]
    for talk in talks:
        texts = [one["content"] if isinstance(one["content"], str) else one["content"][0]["text"] for one in talk]
        forms = [
            talk,
            [{**one, "content": text} for one, text in zip(talk, texts, strict=True)],
            [{**one, "content": [{"type": "text", "text": text}]} for one, text in zip(talk, texts, strict=True)],
        ]
        wanted = []
        for form in forms:
            given = {"chat_template": SOURCES[name], "add_generation_prompt": True, **tok.special_tokens}
            with contextlib.suppress(Exception):  # the template refuses such messages
                wanted += render_jinja_template([form], **given)[0]
        want = next((one for one in wanted if "'type': 'text'" not in one and all(text.strip() in one for text in texts)), None)
        if want is None:
            with pytest.raises(InputError):
                render_chat(talk, SOURCES[name], tok)
            continue
        chat = render_chat(talk, SOURCES[name], tok)
        assert chat.text == want
        assert tok.encode_pieces(chat.segments) == tok.encode(want, add_special_tokens=False)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ '<s>' ~ m.role ~ '[INST]' + m.content + '[/INST]' }}{% endfor %}",
        "{% for m in messages %}{{ '<s>%s[INST]%s[/INST]' % (m.role, m.content) }}{% endfor %}",
        "{% for m in messages %}{{ '<s>{}[INST]{}[/INST]'.format(m.role, m.content) }}{% endfor %}",
        "{% for m in messages %}{{ '<s>%s[INST]%s[/INST]' | format(m.role, m.content) }}{% endfor %}",
        "{% for m in messages %}{{ ['<s>', m.role, '[INST]', m.content, '[/INST]'] | join }}{% endfor %}",
        "{% for m in messages %}{{ ''.join(['<s>', m.role, '[INST]', m.content, '[/INST]']) }}{% endfor %}",
        "{% macro one(m) %}<s>{{ m.role }}[INST]{{ m.content }}[/INST]{% endmacro %}"
        "{% for m in messages %}{{ one(m) | trim }}{% endfor %}",
        "{% set x %}  <S>user[INST]{{ messages[0].content }}[/INST]{% endset %}{{ x.strip().replace('<S>', '<s>') }}",
        "{% set x = ['<s>', '[INST]', '[/INST]'] %}{{ x[0] }}user{{ x[1] }}{{ messages[0].content }}{{ x[2] }}",
        "{% set x = '</s>user[INST]' %}{{ '<' + x[2:] + messages[0].content + '[/inst]'.upper() }}",
        "{% set x = namespace(a='') %}{% set x.a = x.a + '<s>user' %}"
        "{{ x.a.split('|')[0] }}[INST]{{ messages[0].content }}[/INST]",
        "{% filter trim %} <s>user[INST]{{ messages[0].content }}[/INST]{% endfilter %}",
    ],
)
def test_control_tokens_of_the_template_stay_control(source, tmp_path):
    tok = bytes_tokenizer(tmp_path, dict.fromkeys(CONTROL, False))
    chat = render_chat([{"role": "user", "content": "a<s>b"}], source, tok)
    assert chat.text == "<s>user[INST]a<s>b[/INST]"
    control = [number for number in tok.encode_pieces(chat.segments) if number in tok.control.values()]
    assert control == [tok.control[name] for name in ("<s>", "[INST]", "[/INST]")]


def test_numbers_and_roles_complete_a_control_token(tmp_path):
    tok = bytes_tokenizer(tmp_path, {"<|image_1|>": True, "<|user|>": False})
    source = "{% for m in messages %}<|{{ m.role }}|>{{ '<|image_' ~ loop.index ~ '|>' }}{{ m.content }}{% endfor %}"
    ids = tok.encode_pieces(render_chat([{"role": "user", "content": "<|image_1|>"}], source, tok).segments)
    assert ids[:2] == [tok.control["<|user|>"], tok.control["<|image_1|>"]]
    assert set(tok.control.values()).isdisjoint(ids[2:])


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop without a body": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(0) }}",
    "a product": "{{ 'x' * 999999999 }}",
    "a list": "{{ [0] * 999999999 }}",
    "a constant": "{{ 'x' | center(999999999) }}",
    "a method": "{{ 'x'.ljust(999999999) }}",
    "widths": "{{ '%999999999d' % 1 }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "format of a format": "{{ '{:{}}'.format(1, 999999999) }}",
    "format as a filter": "{{ '%*d' | format(999999999, 1) }}",
    "indent": "{{ ('\n' * 9999) | indent(99999) }}",
    "tojson": "{{ messages | tojson(indent=999999999) }}",
    "replace": "{% set x = 'x' * 99999 %}{{ x.replace('x', x) }}",
    "replace as a filter": "{% set x = 'x' * 99999 %}{{ x | replace('x', x) }}",
    "join": "{% set x = 'x' * 99999 %}{{ range(99999) | join(x) }}",
    "join as a method": "{% set x = 'x' * 99999 %}{{ x.join(x) }}",
    "tabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "doubling": "{% set x = namespace(a='xx') %}{% for i in range(99) %}{% set x.a = x.a + x.a %}{% endfor %}",
    "doubling by ~": "{% set x = namespace(a='xx') %}{% for i in range(99) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
    "doubling a block": "{% set x = 'xx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "nested lists": "{% set x = namespace(a=[0]) %}{% for i in range(99) %}{% set x.a = [x.a, x.a] %}{% endfor %}{{ x.a }}",
    "nested objects": "{% set x = namespace(a=0) %}"
    "{% for i in range(99) %}{% set x.a = {1: x.a, 2: x.a} %}{% endfor %}{{ x.a }}",
    "nested by dict": "{% set x = namespace(a=0) %}"
    "{% for i in range(99) %}{% set x.a = dict(a=x.a, b=x.a) %}{% endfor %}{{ x.a }}",
    "powers": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set x = namespace(a=9) %}{% for i in range(99) %}{% set x.a = x.a * x.a %}{% endfor %}",
    "filters": "{% for i in range(99999) %}{{ range(99999) | list | sort | length }}{% endfor %}",
    "deep source": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "a large source": "x" * (1 << 20) + "x",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_have_limits(name, tmp_path):
    tok = bytes_tokenizer(tmp_path, {})
    messages = [{"role": "user", "content": "x"}]
    with measured.allocating_at_most(64 << 20), pytest.raises((InputError, CheckpointError)) as caught:
        render_chat(messages, ENDLESS[name], tok, max_model_len=4096, max_seconds=0.5)
    assert len(str(caught.value)) < 400


def test_errors_name_the_limit(tmp_path):
    tok = bytes_tokenizer(tmp_path, {})
    with pytest.raises(InputError, match=r"takes more than 0\.1 s") as caught:
        render_chat([], "{% for i in range(99999) %}{{ range(9999) | list | length }}{% endfor %}", tok, max_seconds=0.1)
    assert caught.value.info.param == "chat_template"
    with pytest.raises(InputError, match="a prompt of 1048576 characters") as caught:
        render_chat([], "{{ 'x' * 99999999 }}", tok, max_model_len=2048)
    assert (caught.value.info.code, caught.value.info.param) == ("too_long", "chat_template")


def test_texts_that_templates_make_of_texts_keep_their_marks():
    text = TemplateText.concat([TemplateText.written("<a> "), "b", TemplateText.written(" <c>")])
    assert text.pieces() == (("<a> ", True), ("b", False), (" <c>", True))
    cases = {
        text.strip("<>"): "a> b <c",
        text[::-1]: ">c< b >a<",
        text[4]: "b",
        text.replace("b", "<c>"): "<a> <c> <c>",
        text * 2: "<a> b <c><a> b <c>",
        text.removeprefix("<a>").removesuffix("<c>"): " b ",
        text.upper(): "<A> B <C>",
    }
    for changed, want in cases.items():
        assert changed == want
        assert [piece for piece, trusted in changed.pieces() if not trusted] in ([want[4:7]], ["b"], ["B"], ["b", "b"], ["<c>"])
    assert [one.pieces() for one in text.split()] == [(("<a>", True),), (("b", False),), (("<c>", True),)]
    assert [one.pieces() for one in text.rsplit("b", 1)] == [(("<a> ", True),), ((" <c>", True),)]
    assert type(text.swapcase()) is type("-%s" % text) is type(text.zfill(20)) is str  # noqa: UP031
    assert TemplateText(text).pieces() == (("<a> b <c>", False),)


def outcome(template: str, tok: Tokenizer, **options: Any) -> object:
    """Return the pieces of a prompt, or the error."""
    try:
        messages = [{"role": "user", "content": "a <s>\n"}, {"role": "assistant", "content": [{"type": "text", "text": "é"}]}]
        return render_chat(messages, template, tok, **options).segments
    except (InputError, CheckpointError, BusyError) as error:
        return type(error), error.info


BOTH = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
CALLERS = {
    "text": BOTH + "<s>{{ '\\u00e9 \\N{BULLET}' }}{{ messages[0].role | upper }}",
    "numbers": BOTH + "{{ x.i % 7 }} {{ x.f }} {{ x[1] }} {{ x.none }} {{ true }} {{ eos_token }}",
    "dates": BOTH + "{{ strftime_now('%Y %Z') }}",
    "no template": "{% for %}",
    "a refusal": "{{ raise_exception('not so') }}",
    "a missing key": "{{ {}['a'].b }}",
    "too much text": "{{ 'x' * 99999999 }}",
    "too many pieces": BOTH + "{% for c in x.long %}{{ c }}a{% endfor %}",
}


def test_a_callers_template_is_rendered_in_a_worker(tmp_path, monkeypatch):
    """Compiling or rendering a template may hold the interpreter's lock for seconds."""
    tok = bytes_tokenizer(tmp_path, dict.fromkeys(CONTROL, True))
    options = {
        "x": {"i": 10**30, "f": float("inf"), 1: True, "none": None, "long": "b" * 9000},
        "max_model_len": 1024,
        "add_generation_prompt": False,
        "continue_final_message": False,
    }
    inside = {name: outcome(template, tok, **options) for name, template in CALLERS.items()}
    _, info = inside["no template"]
    inside["no template"] = InputError, replace(info, code="invalid_input", param="chat_template")
    monkeypatch.setattr("sensorium.processors.text.chat.render", None)
    assert {name: outcome(template, tok, **options, isolated=True) for name, template in CALLERS.items()} == inside
    types = {name: found[0] for name, found in inside.items() if isinstance(found[0], type)}
    assert types == dict.fromkeys([*CALLERS][3:], InputError)
    talk, both = [{"role": "assistant", "content": "ab "}], {"continue_final_message": True, "add_generation_prompt": False}
    (pieces,) = render_chat(talk, "{{ messages[0].content }}", tok, isolated=True, **both).segments
    assert pieces == ("ab ", False)


def test_a_callers_template_that_cannot_be_compiled_in_time(tmp_path):
    found = outcome("{{ a }}" * (1 << 17), bytes_tokenizer(tmp_path, {}), isolated=True, max_seconds=0.01)
    while found[0] is BusyError:  # the machine gave the worker too little time
        found = outcome("{{ a }}" * (1 << 17), bytes_tokenizer(tmp_path, {}), isolated=True, max_seconds=0.01)
    assert found[1].param == "chat_template"
    assert "takes more than 0.01 s (max_template_seconds)" in found[1].message


@pytest.mark.parametrize("count", [50, 5000])
def test_the_search_for_the_texts_of_messages_is_bounded(count, tmp_path):
    """A piece with a line break, written as JSON, is searched for in the whole prompt. After many searches the check ends."""
    talk = [{"role": "user", "content": "a\nb<b>" * count + "left out"}]
    template = "{{ (messages[0].content | tojson)[:-9] }}"
    with pytest.raises(InputError, match="leaves out or changes its text") if count == 50 else nullcontext():
        render_chat(talk, template, bytes_tokenizer(tmp_path, {}))
