"""Placeholders become spans: found once, from left to right, with exact counts."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.callers.errors import InputError
from sensorium.processors.interface import Span
from sensorium.processors.spans import build_span, lay_out

IMAGE, VIDEO = 9, 8
PLACEHOLDERS = {"image": IMAGE, "video": VIDEO}


def expand(ids, spans, placeholder_ids):
    """Expand a prompt whose inputs have one span each."""
    tokens, ranges = lay_out(ids, {name: [[span] for span in given] for name, given in spans.items()}, placeholder_ids).expand()
    return tokens, {name: [where for (where,) in given] for name, given in ranges.items()}


def pads(count: int, token: int = IMAGE) -> Span:
    return build_span([count], token)


def test_a_placeholder_and_an_expanded_one_are_equal():
    for prompt in ([1, 9, 2], [1, 9, 9, 9, 2]):
        ids, ranges = expand(prompt, {"image": [pads(3)]}, PLACEHOLDERS)
        assert ids == (1, 9, 9, 9, 2)
        assert [(r.offset, r.length, r.is_embed) for r in ranges["image"]] == [(1, 3, None)]


def test_adjacent_placeholders():
    ids, ranges = expand([9, 9, 5], {"image": [pads(3), pads(2)]}, PLACEHOLDERS)
    assert ids == (9,) * 5 + (5,)
    assert [(r.offset, r.end) for r in ranges["image"]] == [(0, 3), (3, 5)]


def test_expanded_and_single_placeholders_mix():
    ids, ranges = expand([9, 9, 4, 9, 4, 8, 8, 8], {"image": [pads(2), pads(3)], "video": [pads(3, VIDEO)]}, PLACEHOLDERS)
    assert ids == (9, 9, 4, 9, 9, 9, 4, 8, 8, 8)
    assert [(r.offset, r.length) for r in ranges["image"]] == [(0, 2), (3, 3)]
    assert [(r.offset, r.length) for r in ranges["video"]] == [(7, 3)]


def test_a_span_with_its_own_text_around_the_embeddings():
    ids, ranges = expand([1, 9, 2], {"image": [build_span([(3,), 2, (4,)], IMAGE)]}, PLACEHOLDERS)
    assert ids == (1, 3, 9, 9, 4, 2)
    assert ranges["image"][0].num_embeds == 2
    assert ranges["image"][0].is_embed.tolist() == [False, True, True, False]


def test_text_around_a_span_is_joined_with_the_prompts():
    """Token 7 is a newline, 77 is two newlines, 777 three, 7777 four."""
    joins = {(7, 77): 777, (77, 7): 777, (77, 77): 7777}
    span = replace(build_span([(3,), 2, (4,)], IMAGE), before=(77,), after=(77,), merges=joins)
    ids, ranges = expand([1, 7, 9, 9, 7, 7], {"image": [span, span]}, PLACEHOLDERS)
    assert ids == (1, 777, 3, 9, 9, 4, 7777, 3, 9, 9, 4, 777, 7)
    assert [(r.offset, r.length) for r in ranges["image"]] == [(2, 4), (7, 4)]
    assert expand(ids, {"image": [span, span]}, PLACEHOLDERS)[0] == ids
    assert expand([1, 9, 2], {"image": [span]}, PLACEHOLDERS)[0] == (1, 77, 3, 9, 9, 4, 77, 2)


def test_items_take_placeholders_in_order():
    ids, _ = expand([9, 9, 9], {"image": [build_span([(-number,)], IMAGE) for number in (1, 2, 3)]}, PLACEHOLDERS)
    assert ids == (-1, -2, -3)


@pytest.mark.parametrize("expanded", [False, True])
def test_a_span_swallows_tokens_that_follow_it(expanded):
    one = replace(build_span([(7,), 2, (6,)], IMAGE), trailing=frozenset((3,)))
    first = [7, 9, 9, 6] if expanded else [9]
    ids, ranges = expand([3, *first, 3, 3, 4, 3, 9, 3], {"image": [one, one]}, PLACEHOLDERS)
    assert ids == (3, 7, 9, 9, 6, 3, 3, 4, 3, 7, 9, 9, 6, 3)
    assert [(r.offset, r.length, r.num_embeds) for r in ranges["image"]] == [(1, 6, 2), (9, 5, 2)]
    assert ranges["image"][0].mask().tolist() == [False, True, True, False, False, False]


def test_no_items_leave_the_prompt_as_it_is():
    assert expand([1, 2, 3], {}, PLACEHOLDERS) == ((1, 2, 3), {})
    assert expand([], {"image": []}, PLACEHOLDERS) == ((), {"image": []})


@pytest.mark.parametrize(
    ("prompt", "items", "text"),
    [
        (
            [1, 9],
            {"image": [pads(2), pads(2)]},
            r"image 1: the prompt has no placeholder for it; write token 9 once for each item \(2 here\)",
        ),
        ([9, 1, 9], {"image": [pads(2)]}, "image 1: the prompt has a placeholder for it but multi_modal_data holds 1"),
        ([8], {"image": []}, "video 0"),
        ([1], {"video": [pads(2, VIDEO)]}, "video 0: the prompt has no placeholder for it"),
        ([9, 9, 9], {"image": [pads(2)]}, "image 1"),  # a run of a wrong length
    ],
)
def test_counts_must_agree(prompt, items, text):
    with pytest.raises(InputError, match=text):
        expand(prompt, items, PLACEHOLDERS)


@given(st.lists(st.one_of(st.integers(10, 15), st.tuples(st.sampled_from(["image", "video"]), st.integers(2, 6))), max_size=12))
def test_spans_replace_their_placeholders(parts):
    prompt, items = [], {"image": [], "video": []}
    for part in parts:
        if isinstance(part, int):
            prompt.append(part)
        else:
            prompt += [7, PLACEHOLDERS[part[0]], 7]
            items[part[0]].append(pads(part[1], PLACEHOLDERS[part[0]]))
    ids, ranges = expand(prompt, items, PLACEHOLDERS)
    assert len(ids) == len(prompt) + sum(len(s.token_ids) - 1 for spans in items.values() for s in spans)
    assert [i for i in ids if i not in PLACEHOLDERS.values()] == [i for i in prompt if i not in PLACEHOLDERS.values()]
    for modality, spans in items.items():
        assert [ids[r.offset : r.end] for r in ranges[modality]] == [s.token_ids for s in spans]
    assert expand(ids, items, PLACEHOLDERS) == (ids, ranges)  # its own output is a prompt that is already expanded


def test_long_prompts_are_walked_once():
    start = time.thread_time()
    expand([1] * 10_000, {}, PLACEHOLDERS)
    expand([9] * 5_000, {"image": [pads(4_999)] + [pads(1)] * 4_999}, PLACEHOLDERS)
    assert time.thread_time() - start < 3.0  # of the processor, 300 times what it takes


def test_an_input_of_several_spans_takes_one_placeholder():
    pieces = [build_span([(mark,), 2], IMAGE) for mark in (5, 6)]
    written = [1, 5, 9, 9, 6, 9, 9, 2, 9, 3]
    ids, ranges = lay_out([1, 9, 2, 9, 3], {"image": [pieces, [pads(1)]]}, PLACEHOLDERS).expand()
    assert list(ids) == written
    assert [[(r.offset, r.length) for r in several] for several in ranges["image"]] == [[(1, 3), (4, 3)], [(8, 1)]]


def test_a_span_with_text_around_may_be_expanded_already():
    span = build_span([(3,), 2, (5,), 1, (4,)], IMAGE)
    for prompt in ([1, 9, 2], [1, *span.token_ids, 2]):
        ids, ranges = expand(prompt, {"image": [span]}, PLACEHOLDERS)
        assert ids == (1, *span.token_ids, 2)
        assert [(r.offset, r.length) for r in ranges["image"]] == [(1, 6)]
    ids, ranges = expand([*span.token_ids, 9, *span.token_ids], {"image": [span] * 3}, PLACEHOLDERS)
    assert ids == span.token_ids * 3
    assert [r.offset for r in ranges["image"]] == [0, 6, 12]
