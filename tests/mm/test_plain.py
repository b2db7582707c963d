"""Copies of arguments in builtin types: methods of the caller's classes run there only, and may raise."""

import enum

import numpy as np
import pytest
from sensorium.mm.errors import InputError, short_repr
from sensorium.mm.plain import builtin_copy, builtin_list, reading


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


@pytest.mark.parametrize(
    "value",
    [
        broken(dict, "items")({"a": 1}),
        broken(list, "__iter__")([1]),
        [{"x": broken(tuple, "__iter__")((1,))}],
    ],
)
def test_methods_that_raise_are_an_input_error(value):
    with pytest.raises(InputError, match=r"^logit_bias, a \w+, cannot be read \(.+\); give a dict, a list or") as error:
        builtin_copy(value, "logit_bias")
    assert error.value.info.param == "logit_bias"


def test_a_class_that_cannot_be_asked():
    with pytest.raises(InputError, match="x, a Broken, cannot be read"):
        builtin_copy(type("Broken", (), {"__class__": property(lambda _: {}[0])})(), "x")


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


def test_lists_and_other_readers():
    entries = [object()]
    assert builtin_list(entries, "x") is entries
    with pytest.raises(InputError, match="prompts, a Broken, cannot be read"):
        builtin_list(broken(list, "__iter__", "__len__")(entries), "prompts")
    with pytest.raises(InputError, match=r"cannot be read \(Hidden\)"), reading(entries, "x"):
        raise Hidden
    with pytest.raises(MemoryError), reading(entries, "x"):
        raise MemoryError
    named_list = type("list", (list,), {"__len__": lambda _: {}[0], "__iter__": lambda _: {}[0]})
    assert short_repr(named_list(entries)) == "a list that cannot be shown"
