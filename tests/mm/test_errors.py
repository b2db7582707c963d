"""What messages about unknown names end with."""

import pytest
from sensorium.mm.errors import hint


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
