"""Patterns of a checkpoint: published ones compile, and those that could hang the loading are refused."""

from __future__ import annotations

import pytest
from sensorium.checkpoints.patterns import compile_pattern


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (r".*\.mlp\..*", "model.layers.3.mlp.up_proj"), (r".*layers\.(0|1)\..*", "model.layers.1.self_attn.q_proj"),
        (r".*lm_head", "lm_head"),
        (r"model.layers.*.mlp.*.experts.*.(gate|up|down)_proj$", "model.layers.1.mlp.experts.2.up_proj"),
        (r"(?:.*?(?:vision|visual).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.(?:up_proj))", "model.layers.10.mlp.up_proj"),
        (r".*\.layers\.(?:[0-9]|[1-5]\d)\.(?!mlp).*\d+", "m.layers.12.q.0"),
    ],
)  # fmt: skip
def test_published_patterns(pattern: str, name: str) -> None:
    assert compile_pattern(pattern).match(name)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        *((one, "repeats") for one in ("(a+)+$", "(a|aa)+$", "(?=(a*)*b)a", "(?:(a+)|b){2,}c", "a?" * 40 + "a" * 40)),
        *((one, "repeats") for one in (".*a" * 9, "(a)?(?(1)(b+)+|c)", "((){9999}){9999}", "(a|aa)" * 40 + "b", "(?>(a+)+)b")),
        ("a" * 5000, "5,000 characters"), ("(", "unterminated"), ("a{99999999999}", "too large"),
        ("(" * 2000, "unterminated|recursion"),
    ],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compile_pattern(pattern)
