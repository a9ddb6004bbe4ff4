"""Lines with names, titles, abbreviations, units and prices as people write them; and how they are read.

A model learns from the written form, a synthesizer is given the spoken one (`spoken_form`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
TITLES = {
    "Mr.": "Mister",
    "Mrs.": "Missus",
    "Ms.": "Miz",
    "Dr.": "Doctor",
    "Prof.": "Professor",
    "Gen.": "General",
    "Col.": "Colonel",
    "Capt.": "Captain",
    "Sgt.": "Sergeant",
    "Rev.": "Reverend",
    "Sen.": "Senator",
    "Gov.": "Governor",
    "St.": "Saint",
}
"""Titles, which stand before a name."""
ABBREVIATIONS = TITLES | {
    "Jr.": "Junior",
    "Sr.": "Senior",
    "Mt.": "Mount",
    "Ave.": "Avenue",
    "vs.": "versus",
    "etc.": "et cetera",
    "e.g.": "for example",
    "i.e.": "that is",
    "approx.": "approximately",
    "Inc.": "Incorporated",
    "Ltd.": "Limited",
    "a.m.": "A M",
    "p.m.": "P M",
    "U.S.": "U S",
    "U.K.": "U K",
    "U.N.": "U N",
    "D.C.": "D C",
    "Ph.D.": "P H D",
}
UNITS = {
    "km": "kilometers",
    "cm": "centimeters",
    "mm": "millimeters",
    "kg": "kilograms",
    "lbs": "pounds",
    "ft": "feet",
    "mph": "miles per hour",
    "GB": "gigabytes",
    "MB": "megabytes",
    "kHz": "kilohertz",
}
"""Units, which stand after a number."""
SPELLED = (
    *("FBI", "CIA", "BBC", "CNN", "USA", "UK", "TV", "PC", "CD", "DVD", "DNA", "CEO", "GPS", "USB", "HTML"),
    *("IBM", "MIT", "NBA", "UFO", "VIP", "PhD", "FAQ", "URL", "HR", "ATM", "SMS", "NYPD", "GDP", "HIV"),
)
"""Read letter by letter. Letters alone tell them from words, since the model reads no capitals: no US, IT or AI."""
WORDS = ("NASA", "NATO", "UNESCO", "UNICEF", "OPEC", "AIDS")
"""Read as words."""
GIVEN_NAMES = (
    *(
        "Anna",
        "Maria",
        "Olivia",
        "Emma",
        "Sophia",
        "Amelia",
        "Fatima",
        "Aisha",
        "Mei",
        "Priya",
        "Yuki",
        "Elena",
        "Ingrid",
    ),
    *(
        "Chloe",
        "Zoe",
        "Grace",
        "Hannah",
        "Julia",
        "Laura",
        "Nina",
        "Sarah",
        "Rachel",
        "Lucy",
        "Isabel",
        "Carmen",
        "Nadia",
    ),
    *("James", "Liam", "Noah", "Oliver", "Lucas", "Ahmed", "Omar", "Wei", "Arjun", "Kenji", "Ivan", "Lars", "Pablo"),
    *(
        "David",
        "Daniel",
        "Michael",
        "Thomas",
        "Peter",
        "Samuel",
        "Jacob",
        "Ethan",
        "Marco",
        "Hugo",
        "Felix",
        "Leo",
        "Tom",
    ),
)
SURNAMES = (
    *("Smith", "Johnson", "Brown", "Garcia", "Miller", "Davis", "Martinez", "Lopez", "Wilson", "Anderson", "Taylor"),
    *("Nguyen", "Chen", "Wang", "Kim", "Patel", "Singh", "Khan", "Tanaka", "Ivanov", "Kowalski", "Rossi", "Schmidt"),
    *("Larsen", "Dubois", "Silva", "Santos", "O'Brien", "MacDonald", "Hughes", "Baker", "Clark", "Wright", "Young"),
)
CITIES = ("London", "Paris", "Boston", "Chicago", "Hanoi", "Cairo", "Berlin", "Madrid", "Tokyo", "Lagos", "Sydney")

_ABBREVIATION = re.compile(
    r"(?<![\w.])("
    + "|".join(re.escape(one) for one in sorted(ABBREVIATIONS, key=len, reverse=True))
    + r")(?!\w)(\s*$)?"
)
_BARE_TITLE = re.compile(r"\b(Mr|Mrs|Dr)\b(?!\.)")
_SPELLED = re.compile(rf"\b({'|'.join(SPELLED)})\b")
_WORDS = re.compile(rf"\b({'|'.join(WORDS)})\b")
_UNIT = re.compile(rf"(?<=\d) ?({'|'.join(UNITS)})\b")
_DOLLARS = re.compile(r"\$(\d[\d,]*)(?:\.(\d\d))?")


def spoken_form(text: str) -> str:
    """The text with titles, abbreviations, units, prices and acronyms spelled out."""
    text = _ABBREVIATION.sub(lambda found: ABBREVIATIONS[found[1]] + ("." if found[2] is not None else ""), text)
    text = _DOLLARS.sub(lambda found: f"{found[1]} dollars" + (f" and {found[2]} cents" if found[2] else ""), text)
    text = re.sub(r"(?<=\d) ?%", " percent", text)
    text = re.sub(r"\bNo\. (?=\d)", "number ", text)
    text = _UNIT.sub(lambda found: f" {UNITS[found[1]]}", text)
    text = _SPELLED.sub(lambda found: " ".join(found[1].upper()), text)
    text = _WORDS.sub(lambda found: found[1].capitalize(), text)
    return text.replace(" & ", " and ")


def with_dotted_titles(text: str) -> str:
    """Titles as most people write them; prose was cut into sentences at dots, and has lost those."""
    return _BARE_TITLE.sub(r"\1.", text)


def written_line(rng: random.Random, people: Sequence[str], places: Sequence[str]) -> str:
    """A line with names, titles, abbreviations, units or prices as they are written."""

    def person() -> str:
        kind = rng.random()
        if people and kind < 0.4:
            return rng.choice(people)
        given = rng.choice(GIVEN_NAMES)
        return given if kind < 0.6 else f"{given} {rng.choice(SURNAMES)}"

    def place() -> str:
        return rng.choice(places) if places and rng.random() < 0.8 else rng.choice(CITIES)

    def titled() -> str:
        return f"{rng.choice(tuple(TITLES)[:-1])} {rng.choice(SURNAMES)}"

    def half() -> str:
        return rng.choice(("a.m.", "p.m."))

    acronym, month, day, year = (
        rng.choice((*SPELLED, *WORDS)),
        rng.choice(MONTHS),
        rng.randint(1, 28),
        rng.randint(1850, 2035),
    )
    few, many, hour, minute = rng.randint(2, 20), rng.randint(21, 950), rng.randint(1, 12), rng.randint(10, 59)
    unit = rng.choice(tuple(UNITS))
    kinds = (
        lambda: f"{person()}.",
        lambda: f"{place()}.",
        lambda: f"My name is {person()}.",
        lambda: f"{person()} was born in {place()} in {year}.",
        lambda: f"We flew from {place()} to {place()} on {month} {day}.",
        lambda: f"Dear {titled()}, thank you for your letter.",
        lambda: f"{titled()} will see you at {hour}:{minute} {half()}",
        lambda: f"{person()}, {person()} and {person()} have met in {place()}.",
        lambda: f"Is {person()} still in {place()}?",
        lambda: f"{place()} is {many} km from {place()}.",
        lambda: f"It is {many} {unit} or {few} {unit} in all.",
        lambda: f"The ticket costs ${few}.{rng.choice((25, 50, 75, 95, 99))}, not ${many}.",
        lambda: f"About {few}% of the {many} people came from the U.S. or the U.K.",
        lambda: f"{person()} worked for the {acronym} until {year}.",
        lambda: f"The {acronym} opens at {hour} {half()} on No. {few} {rng.choice(SURNAMES)} Ave. in {place()}.",
        lambda: f"Bring bread, milk, eggs, etc. to {titled()}, i.e. to {place()}.",
        lambda: f"{person()} & {person()}, {rng.choice(SURNAMES)} Inc.",
        lambda: f"{titled()} vs. {titled()}, {month} {day}, {year}.",
        lambda: f"Call {person()} at {' '.join(str(rng.randint(0, 9)) for _ in range(7))}.",
        lambda: f"{titled()} moved to Mt. {rng.choice(SURNAMES)} near {place()}, approx. {few} {unit} away.",
        lambda: f"Where is {place()}, and who is {person()}?",
        lambda: f"St. {rng.choice(GIVEN_NAMES)} is a church in {place()}.",
    )
    return rng.choice(kinds)()
