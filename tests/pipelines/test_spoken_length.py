"""How long a written text takes to say, and which words belong to one number."""

from __future__ import annotations

import pytest
from sensorium.pipelines.speech.spoken_length import (
    fast_seconds,
    is_number_like,
    normal_seconds,
    number_groups,
    slow_seconds,
    spoken_syllables,
    spoken_words,
)

SPOKEN = [  # written, spoken
    ("1,327,451", "one million three hundred twenty seven thousand four hundred fifty one"),
    ("$1,234.56", "one thousand two hundred thirty four dollars and fifty six cents"),
    ("12.5%", "twelve point five percent"),
    ("3:45 PM", "three forty five P M"),
    ("1.327.451", "eine Million dreihundertsiebenundzwanzigtausendvierhunderteinundfünfzig"),
    ("1984", "mille neuf cent quatre-vingt-quatre"),
    ("1984", "тысяча девятьсот восемьдесят четыре"),
    ("120 km/h", "one hundred twenty kilometres per hour"),
    ("€99", "neunundneunzig Euro"),
    ("1,327,451원입니다", "백삼십이만칠천사백오십일원입니다"),
    ("2026년11월29일에는", "이천이십육년십일월이십구일에는"),
    ("1,327,451dollars", "one million three hundred twenty seven thousand four hundred fifty one dollars"),
    ("2026年11月29日", "二千二十六年十一月二十九日"),
    ("part12", "part twelve"),
    ("SCHMIDTPQRT", "S C H M I D T P Q R T"),
]


@pytest.mark.parametrize(("written", "spoken"), SPOKEN)
def test_a_written_number_takes_about_as_long_as_its_words(written: str, spoken: str) -> None:
    assert 0.6 <= spoken_syllables(written, is_spelled=True) / spoken_syllables(spoken) <= 1.7
    assert fast_seconds(written) < normal_seconds(written) < slow_seconds(written)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("strength", 1),
        ("telephone", 3.5),
        ("international", 5),
        ("don't", 1),
        ("well-known", 2),
        ("電話番号", 4),
        ("שלום", 1.6),
        ("part2", 2.3),
        ("m²", 3.3),
        ("WASHINGTON", 3),
    ],
)
def test_syllables_of_words(text: str, expected: float) -> None:
    assert spoken_syllables(text) == pytest.approx(expected, abs=0.6)


@pytest.mark.parametrize(
    "text",
    [
        "1,327,451원입니다.",
        "12월에는",
        "СССР",
        "mRNA",
        "SCHMIDT",
        "QWERTYU",
        "URLs",
        "www",
        "a.de",
        "me@x.org",
        "½",
        "Boeing747",
    ],
)
def test_number_like_with_letters(text: str) -> None:
    assert is_number_like(text)


@pytest.mark.parametrize("text", ["1", "1984", "$5", "50%", "3rd", "PM", "B", "B7K9", "S-M-I-T-H", "USA", "€", "1,327,451."])
def test_number_like(text: str) -> None:
    assert is_number_like(text)


@pytest.mark.parametrize(
    "text",
    [
        "word",
        "I",
        "A",
        "don't",
        "well-known",
        "dogs.",
        "«Oui»",
        "你好",
        "-",
        "...",
        "part2",
        "word12",
        "LONDON",
        "Кремль",
        "iPhone",
        "d'un",
    ],
)
def test_not_number_like(text: str) -> None:
    assert not is_number_like(text)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1,327,451원입니다", "1,327,451"),
        ("2026년11월29일에는", "20261129"),
        ("١٣٢٧٤٥١درهم", "١٣٢٧٤٥١"),
        ("1,327,451dollars", "1,327,451"),
        ("१३२७४५१रुपये", "१३२७४५१"),
        ("www.example.com", "S P E L L E D"),
        ("jsmith@example.com", "S P E L L E D"),
        ("SCHMIDT", "S P E L L E D"),
    ],
)
def test_letters_beside_digits_and_in_addresses_do_not_shorten_a_word(text: str, part: str) -> None:
    assert slow_seconds(text) >= slow_seconds(part)
    assert spoken_words(text) >= sum(map(str.isdigit, part))


def test_digits_count_as_words() -> None:
    assert spoken_words("The total is $1,234.56 today") == 4 + 7
    assert spoken_words("one two three") == 3


def test_the_parts_of_a_number_are_one_group() -> None:
    words = [" It", " is", " $", "8", ",674", ".56", ".", " He", " said", " 5", " 5", " 1", "."]
    assert number_groups(words) == [(0, 1), (1, 2), *[(2, 7)] * 5, (7, 8), (8, 9), *[(9, 13)] * 4]


@pytest.mark.parametrize(
    ("words", "group"),
    [
        ([" visit", " www", ".", "example", ".", "com", " now"], (1, 6)),
        (["网", "址", "是", "www", ".example", ".com", "吗"], (3, 6)),
        ([" to", " j", "smith", "@example", ".com", " now"], (1, 5)),
        ([" it", " is", " S", " C", " H", " M", " I", " D", " T", ",", " he"], (2, 10)),
        ([" it", " is", " s", "-m", "-i", "-t", "-h", " he"], (2, 7)),
        ([" 총", " 1", ",327", ",451원입니다", ".", " 그"], (1, 5)),
    ],
)
def test_the_parts_of_addresses_and_spelled_words_are_one_group(words: list[str], group: tuple[int, int]) -> None:
    assert number_groups(words) == [group if group[0] <= at < group[1] else (at, at + 1) for at in range(len(words))]
