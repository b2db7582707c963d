"""Copies of arguments in builtin types."""

import enum

import numpy as np
import pytest
from sensorium.callers.errors import InputError, short_repr
from sensorium.callers.plain import builtin_copy


class Hidden(Exception):
    def __str__(self):
        raise RuntimeError


def broken(base, *names):
    """Return a class whose methods of these names raise an exception that cannot be shown either."""

    def fail(*_):
        raise Hidden

    return type("Broken", (base,), dict.fromkeys(names, fail))


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    def __str__(self):
        return "other"

    encode = __len__ = None


def test_containers_texts_and_numbers_become_builtin():
    image = object()
    given = {"a": (Number.ONE, [Text("x"), np.float64(0.5)]), Text("b"): broken(list, "append")([None, image])}
    found = builtin_copy(given, "x")
    assert found == {"a": (1, ["x", 0.5]), "b": [None, image]}
    assert found["b"][1] is image
    kinds = {type(value) for value in (found["a"][0], *found["a"][1], *found, found["b"])}
    assert kinds == {int, str, float, list}
    numbers = [0.5] * 10_000
    assert builtin_copy({"x": numbers}, "x")["x"] is numbers, "samples of audio are not copied"
    mixed = [0.5] * 5000 + ["x"] + [1] * 5000
    assert builtin_copy(mixed, "x") == mixed


def test_methods_of_numbers_and_texts_are_not_called():
    for base, value in ((int, 7), (float, 0.5), (str, "x")):
        names = "__int__", "__float__", "__str__", "__len__", "__eq__", "__index__", "__repr__"
        copied = builtin_copy([broken(base, *names)(value)], "x")
        assert copied == [value]
        assert type(copied[0]) is base


def test_sizes_and_depth_are_limited():
    limits = {"max_chars": 1000, "option": "max_template_chars"}
    for value in ("x" * 1001, ["x" * 600] * 2, {"x" * 1001: 1}, [0] * 63, [{}] * 63, {str(i): 1 for i in range(62)}):
        with pytest.raises(InputError, match=r"tools has more than 1,000 characters .*raise max_template_chars") as error:
            builtin_copy(value, "tools", **limits)
        assert error.value.info.param == "tools"
    assert builtin_copy(["x" * 480] * 2, "tools", **limits) == ["x" * 480] * 2
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="nest at most 64 deep"):
        builtin_copy(deep, "x")
    with pytest.raises(InputError, match="keys must be strings or numbers"):
        builtin_copy({(): 1}, "x")


def test_an_object_that_cannot_be_shown_has_a_short_repr():
    named_list = type("list", (list,), {"__len__": lambda _: {}[0], "__iter__": lambda _: {}[0]})
    assert short_repr(named_list([object()])) == "a list that cannot be shown"
