"""Errors as data, through pickle and copy; hints, types and values in messages."""

import copy
import errno
import pickle
import sqlite3
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.callers.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    ErrorCode,
    ErrorInfo,
    HubError,
    InputError,
    MediaError,
    SensoriumError,
    hint,
    is_disk_full,
    media_error,
    short_repr,
    typed,
)
from sensorium.engine.errors import error_info

ERRORS = [
    SensoriumError("a"),
    ConfigError("b", param="dtype"),
    CheckpointError("c"),
    InputError("d", code="too_long", param="prompt"),
    MediaError("video", 3, "e", param="fps"),
    EngineDeadError("f"),
    BusyError("h"),
    HubError("g"),
]
CODES = ["invalid_input", "invalid_config", "checkpoint", "too_long", "invalid_media", "engine_dead", "busy", "unreachable"]


def subclasses(kind):
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


KINDS = [SensoriumError, *(kind for kind in subclasses(SensoriumError) if kind.__module__ == SensoriumError.__module__)]


def test_every_class_is_among_the_examples():
    assert {type(error) for error in ERRORS} == set(KINDS)


@pytest.mark.parametrize("remake", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickle_and_copy(error, remake):
    error.add_note("note")
    again = remake(error)
    assert type(again) is type(error)
    assert again is not error
    assert (again.args, str(again), again.__dict__) == (error.args, str(error), error.__dict__)


@pytest.mark.parametrize(("error", "code"), zip(ERRORS, CODES, strict=True))
def test_the_code_is_that_of_the_class_unless_given(error, code):
    assert error.info.code == code


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_of_outputs_become_exceptions(error):
    again = error.info.exception()
    assert (again.info, str(again), again.args) == (error.info, str(error), error.args)
    kind = InputError if type(error) in (SensoriumError, HubError) else type(error)
    assert type(again) is kind
    assert getattr(again, "reason", None) == getattr(error, "reason", None)


@given(st.sampled_from(KINDS), st.text(), st.text(), st.integers(), st.data())
def test_any_error_survives_pickle(kind, text, param, index, data):
    own = (data.draw(st.sampled_from(["image", "video", "audio"])), index) if kind is MediaError else ()
    error = kind(*own, text, code=data.draw(st.none() | st.sampled_from(get_args(ErrorCode))), param=param or None)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert (type(again), again.args, again.__dict__) == (kind, error.args, error.__dict__)


def test_a_pool_worker_raises_them_in_its_parent():
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(MediaError, match="video 3: e") as caught,
    ):
        pool.submit(_raise_media_error).result()
    assert caught.value.info.index == 3


def _raise_media_error():
    raise MediaError("video", 3, "e")


def test_the_item_is_in_the_message_and_in_the_data():
    info = MediaError("video", 3, "two\nlines", param="fps").info
    assert info == ErrorInfo("invalid_media", "video 3: two lines", "video", 3, "fps")
    assert str(info) == info.message
    assert ErrorInfo("not_finite", "odd").for_item("image", 1) == ErrorInfo("not_finite", "image 1: odd", "image", 1)


def test_media_error_names_the_item():
    assert media_error(InputError("bad"), "image", 1).info == ErrorInfo("invalid_media", "image 1: bad", "image", 1)
    long = media_error(InputError("long", code="too_long", param="fps"), "video", 0).info
    assert long == ErrorInfo("too_long", "video 0: long", "video", 0, "fps")
    assert str(media_error(MediaError("image", 5, "bad"), "image", 1)) == "image 1: bad"


@pytest.mark.parametrize(
    ("value", "text"),
    [("a\nb", r"'a\nb'"), ([1, 2], "[1, 2]"), ("x" * 200, "'" + "x" * 79 + "..."), (np.zeros((2, 1)), "array([[0.], [0.]])")],
)
def test_short_repr(value, text):
    assert short_repr(value) == text


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("max_pixel", ("fps", "max_pixels"), "did you mean max_pixels? The known ones are fps, max_pixels"),
        ("TINY-VL", ("tiny-asr", "tiny-vl"), "did you mean tiny-vl? The known ones are tiny-asr, tiny-vl"),
        ("max_PIXEL", ("MAX_PIXELS", "max_pixels"), "did you mean MAX_PIXELS? The known ones are MAX_PIXELS, max_pixels"),
        ("zzz", ("fps", "max_pixels"), "the known ones are fps, max_pixels"),
        (None, {"fps": 1}, "the known ones are fps"),
        ("fps", (), "none is known"),
    ],
)
def test_hint(name, known, expected):
    assert hint(name, known) == expected


@pytest.mark.parametrize(
    ("value", "called"),
    [
        (3, "an int"),
        ("x", "a str"),
        (None, "None"),
        (np.zeros(2), "an ndarray"),
        (np.uint8(1), "a uint8"),
        (object(), "an object"),
    ],
)
def test_typed(value, called):
    assert typed(value) == called


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (ExceptionGroup("lines", [ValueError(), OSError(errno.ENOSPC, "full")]), True),
        (OSError(errno.EIO, "broken"), False),
        (ValueError("disk is full"), False),
    ],
)
def test_a_full_disk_is_recognised(error, is_full):
    assert is_disk_full(error) == is_full
    assert (error_info(error, "a request").code == "disk_full") == is_full


def test_a_full_database_is_a_full_disk():
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA max_page_count = 2")
    database.execute("CREATE TABLE t (x)")
    with pytest.raises(sqlite3.OperationalError) as error:
        database.execute("INSERT INTO t VALUES (zeroblob(100000))")
    assert is_disk_full(error.value)
