"""Random sentences for tiny-asr from a grammar of a few hundred English words. Numbers are written as words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Rng = np.random.Generator


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


UNITS = _split("zero one two three four five six seven eight nine")
TEENS = _split("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
TENS = _split("twenty thirty forty fifty sixty seventy eighty ninety")
ORDINALS = _split(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth"
)
DAYS = _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _split("January February March April May June July August September October November December")
NAMES = _split("Anna Peter Maria David Laura Simon Emma Oliver Julia Martin Sarah Thomas")
ROOMS = _split("kitchen bedroom bathroom garden hall office garage")
DEVICES = _split("light lamp fan heater radio television camera")
FOODS = _split("milk bread butter cheese coffee sugar rice soup water tomatoes apples oranges bananas eggs onions potatoes")
COLOURS = _split("red green blue yellow black white orange purple brown")
ADJECTIVES = _split("old new big small happy quiet young heavy empty beautiful clean broken")
ANIMALS = _split("dog cat horse bird rabbit sheep lion tiger monkey elephant")
PEOPLE = _split("man woman boy girl teacher doctor farmer driver student baker")
THINGS = _split("book table chair window door bottle letter basket picture ball box clock pencil hammer")
PLACES = _split("river forest school station market bridge church harbour hospital library mountain village")
VERBS = _split("sees finds likes follows remembers watches carries paints")
TASKS = ("water the plants", "feed the cat", "buy bread", "wash the car", "pay the bill", "open the shop", "clean the kitchen")
SINGLE = (  # words of the first stage, without homophones
    *UNITS, *TEENS, *TENS, *DAYS, *MONTHS, *NAMES, *ROOMS, *DEVICES, *FOODS, *COLOURS, *ADJECTIVES, *ANIMALS, *PEOPLE, *THINGS,
    *PLACES, "yes", "no", "stop", "start", "play", "pause", "open", "close", "left", "right", "up", "down", "louder", "quieter",
    "next", "back", "again", "cancel", "help", "hello", "thank you", "please", "repeat", "faster", "slower", "continue",
)  # fmt: skip


def pick(rng: Rng, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]


def below_hundred(n: int) -> str:
    if n < 20:
        return (UNITS + TEENS)[n]
    return TENS[n // 10 - 2] + (f" {UNITS[n % 10]}" if n % 10 else "")


def number(n: int) -> str:
    """Return 0 to 999,999 in words."""
    if n < 100:
        return below_hundred(n)
    if n < 1000:
        return f"{UNITS[n // 100]} hundred" + (f" and {below_hundred(n % 100)}" if n % 100 else "")
    rest = n % 1000
    return f"{number(n // 1000)} thousand" + (f"{' and' if rest < 100 else ''} {number(rest)}" if rest else "")


def ordinal(n: int) -> str:
    """Return 1 to 39 as an ordinal, such as "twenty third"."""
    if n <= 20:
        return ORDINALS[n - 1]
    return "thirtieth" if n == 30 else f"{TENS[n // 10 - 2]} {ORDINALS[n % 10 - 1]}"


def digits(rng: Rng, low: int = 2, high: int = 7) -> str:
    return " ".join(pick(rng, UNITS) for _ in range(int(rng.integers(low, high + 1))))


def some_number(rng: Rng) -> str:
    return number(int(rng.integers(0, int(rng.choice([20, 100, 1000, 10_000, 100_000])))))


def date(rng: Rng) -> str:
    day, month = ordinal(int(rng.integers(1, 32))), pick(rng, MONTHS)
    year = (
        f" {below_hundred(int(rng.integers(18, 21)))} {below_hundred(int(rng.integers(10, 100)))}" if rng.random() < 0.4 else ""
    )
    text = f"the {day} of {month}" if rng.random() < 0.5 else f"{month} the {day}"
    return (f"{pick(rng, DAYS)} " if rng.random() < 0.4 else "") + text + year


def time_of_day(rng: Rng) -> str:
    hour, kind = below_hundred(int(rng.integers(1, 13))), rng.random()
    if kind < 0.15:
        return f"{hour} o'clock"
    if kind < 0.35:
        return f"{pick(rng, ('half past', 'a quarter past', 'a quarter to', 'ten past', 'twenty to', 'five to'))} {hour}"
    text = f"{hour} {below_hundred(int(rng.integers(10, 60)))}"
    return text + (f" in the {pick(rng, ('morning', 'afternoon', 'evening'))}" if rng.random() < 0.4 else "")


def amount(rng: Rng) -> str:
    kind, n = rng.random(), int(rng.integers(2, 100))
    if kind < 0.4:
        cents = f" and {below_hundred(int(rng.integers(2, 100)))} cents" if rng.random() < 0.6 else ""
        return f"{below_hundred(n)} dollars{cents}"
    unit = pick(rng, ("percent", "kilometres", "minutes", "hours", "degrees", "grams", "metres", "kilograms", "days", "weeks"))
    return f"{'minus ' if unit == 'degrees' and rng.random() < 0.4 else ''}{below_hundred(n)} {unit}"


def command(rng: Rng) -> str:
    n, device, room, name = below_hundred(int(rng.integers(2, 60))), pick(rng, DEVICES), pick(rng, ROOMS), pick(rng, NAMES)
    forms = (
        f"turn {pick(rng, ('on', 'off'))} the {room} {device}",
        f"turn {pick(rng, ('on', 'off'))} the {device} in the {room}",
        f"set a timer for {n} {pick(rng, ('minutes', 'seconds', 'hours'))}",
        f"set an alarm for {time_of_day(rng)}",
        f"wake me up at {time_of_day(rng)}",
        f"{pick(rng, ('play', 'stop', 'pause'))} the music in the {room}",
        f"call {name} {pick(rng, ('now', 'tomorrow', 'again', 'please'))}",
        f"send a message to {name}",
        f"{pick(rng, ('open', 'close', 'lock'))} the {pick(rng, ('window', 'door'))} in the {room}",
        f"add {pick(rng, FOODS)} to the shopping list",
        f"remind me to {pick(rng, TASKS)} {pick(rng, ('at ' + time_of_day(rng), 'on ' + pick(rng, DAYS), 'tomorrow'))}",
        f"{pick(rng, ('go to', 'read', 'print', 'delete'))} {pick(rng, ('page', 'chapter', 'file'))} {some_number(rng)}",
        f"turn {pick(rng, ('left', 'right'))} after {amount(rng)}",
        f"make the {device} {pick(rng, ('brighter', 'louder', 'warmer', 'quieter', 'colder'))}",
        f"set the {pick(rng, ('volume', 'heater', 'temperature'))} to {n} {pick(rng, ('percent', 'degrees'))}",
        f"book a table for {pick(rng, UNITS[2:])} people at {time_of_day(rng)}",
        f"move my meeting with {name} to {pick(rng, (date(rng), pick(rng, DAYS)))}",
    )
    return pick(rng, forms)


def question(rng: Rng) -> str:
    forms = (
        "what time is it", f"what is the weather {pick(rng, ('today', 'tomorrow', 'this week', 'on ' + pick(rng, DAYS)))}",
        f"where is the {pick(rng, COLOURS)} {pick(rng, THINGS)}", f"how much is {some_number(rng)} plus {some_number(rng)}",
        f"when does the train leave for the {pick(rng, PLACES)}", f"how far is it to the {pick(rng, PLACES)}",
        f"who is the {pick(rng, ADJECTIVES)} {pick(rng, PEOPLE)} near the {pick(rng, PLACES)}",
        f"is the {pick(rng, ROOMS)} {pick(rng, DEVICES)} on", f"how many {pick(rng, FOODS[9:])} are in the {pick(rng, THINGS)}",
        f"what is on my calendar on {pick(rng, (date(rng), pick(rng, DAYS)))}",
    )  # fmt: skip
    return f"{pick(rng, forms)}?"


def sentence(rng: Rng) -> str:
    def phrase(nouns: Sequence[str]) -> str:
        word = pick(rng, COLOURS if nouns is THINGS and rng.random() < 0.6 else ADJECTIVES) if rng.random() < 0.7 else ""
        return f"the {word} {pick(rng, nouns)}" if word else f"the {pick(rng, nouns)}"

    who, thing = phrase(PEOPLE if rng.random() < 0.5 else ANIMALS), phrase(THINGS)
    forms = (
        f"{who} {pick(rng, VERBS)} {thing}",
        f"{who} {pick(rng, VERBS)} {thing} near the {pick(rng, PLACES)}",
        f"{pick(rng, NAMES)} has {pick(rng, UNITS[2:])} {pick(rng, FOODS[9:])}",
        f"{pick(rng, NAMES)} and {pick(rng, NAMES)} live near the {pick(rng, PLACES)}",
        f"I would like {pick(rng, FOODS)} and {pick(rng, FOODS)} please",
        f"the {pick(rng, FOODS[:9])} costs {amount(rng)}",
        f"the {pick(rng, THINGS)} is {pick(rng, ('under', 'behind', 'on', 'beside'))} the {pick(rng, THINGS)}",
        f"we walk to the {pick(rng, PLACES)} every {pick(rng, DAYS)}",
        f"my {pick(rng, ('brother', 'sister', 'mother', 'father'))} is {below_hundred(int(rng.integers(20, 90)))} years old",
        f"the meeting is on {date(rng)}",
        f"the train leaves at {time_of_day(rng)}",
        f"today is {date(rng)}",
        f"my number is {digits(rng, 4, 6)}",
        f"it is {amount(rng)} to the {pick(rng, PLACES)}",
    )
    return pick(rng, forms)


KINDS: dict[str, Callable[[Rng], str]] = {
    "word": lambda rng: pick(rng, SINGLE),
    "digits": digits,
    "number": some_number,
    "date": date,
    "time": time_of_day,
    "amount": amount,
    "command": command,
    "question": question,
    "sentence": sentence,
}


def utterance(rng: Rng, kind: str) -> str:
    """Return a text of `kind` with a capital first and a final period or question mark."""
    text = KINDS[kind](rng)
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case and without punctuation, for the word error rate."""
    return "".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split()
