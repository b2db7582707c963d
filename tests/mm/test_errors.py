"""What messages about unknown names end with, and what they call a type."""

import numpy as np
import pytest
from sensorium.mm.errors import hint, typed


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("max_pixel", ("fps", "max_pixels"), "did you mean max_pixels? The known ones are fps, max_pixels"),
        ("zzz", ("fps", "max_pixels"), "the known ones are fps, max_pixels"),
        (None, {"fps": 1}, "the known ones are fps"),
        ("fps", (), "none is known"),
    ],
)
def test_the_nearest_name_and_all_of_them(name, known, expected):
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
def test_a_type_has_its_article(value, called):
    assert typed(value) == called
