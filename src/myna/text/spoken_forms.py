"""Text in its spoken form: numbers, dates, money, units and abbreviations in words, by language.

English has rules here. Vietnamese uses sea-g2p if it is installed. In Arabic, letters and digits are made uniform and
numbers stay digits: their words depend on the gender of what is counted. Other languages stay unchanged.
"""

import functools
import importlib.util
import re
import unicodedata
from typing import Any

from myna.core.errors import import_optional
from myna.text.normalization import ENGLISH_ABBREVIATIONS, MONTHS, TATWEEL, base_language, normalise_text

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
IRREGULAR_ORDINALS = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"},
    "twelve": "twelfth",
}
MONTH = rf"(?:{'|'.join(MONTHS)})"
UNITS = {
    **{"km/h": "kilometer per hour", "mph": "mile per hour", "km": "kilometer", "cm": "centimeter", "mm": "millimeter"},
    **{"kg": "kilogram", "mg": "milligram", "ml": "milliliter", "kHz": "kilohertz", "MHz": "megahertz", "Hz": "hertz"},
    **{"GB": "gigabyte", "MB": "megabyte", "kB": "kilobyte", "°C": "degree Celsius", "°F": "degree Fahrenheit"},
    **{"°": "degree", "%": "percent", "lb": "pound", "lbs": "pound", "ft": "foot", "oz": "ounce", "min": "minute"},
}
CURRENCIES = {"$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny")}
PLURALS = {"foot": "feet", "penny": "pence", "percent": "percent", "hertz": "hertz", "kilohertz": "kilohertz"}
FRACTIONS = {"1/2": "one half", "1/3": "one third", "2/3": "two thirds", "1/4": "one quarter", "3/4": "three quarters"}
SYMBOLS = {"&": "and", "+": "plus", "=": "equals", "@": "at"}
NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
ROMAN = {"II": 2, "III": 3, "IV": 4, "VI": 6, "VII": 7, "VIII": 8, "IX": 9, "XI": 11, "XII": 12}
"""Roman numerals that are expanded. I, V and X alone are letters as often as numbers."""
ARABIC_FORMS = str.maketrans({TATWEEL: "", "ی": "ي", "ک": "ك", "٫": ".", "٬": ","})


def normalise_spoken_text(text: str, language: str, *, diacritics: bool = False) -> str:
    """Return the text as it is read aloud. `diacritics` adds vowel signs to Arabic by text2tashkeel; the default does
    not."""
    text = normalise_text(text)
    base = base_language(language)
    if base == "en":
        spoken = text
        for pattern, replace in _english_rules():
            spoken = pattern.sub(replace, spoken)
        spoken = " ".join(spoken.split())
        # The full stop of an abbreviation also ended the sentence.
        return f"{spoken}." if text.endswith(".") and not spoken.endswith(".") else spoken
    if base == "vi" and importlib.util.find_spec("sea_g2p") is not None:
        spoken = str(_vietnamese_normalizer().normalize(text))
        return " ".join(re.sub(r"</?en>", "", spoken).split())
    if base == "ar":
        text = unicodedata.normalize("NFKC", text).translate(ARABIC_FORMS)
        text = "".join(str(unicodedata.decimal(letter)) if letter.isdecimal() else letter for letter in text)
        if diacritics:
            return str(import_optional("text2tashkeel", "pip install text2tashkeel").diacritize(text))
    return text


def number_words(number: int) -> str:
    """Return a number in words: one thousand two hundred thirty-four."""
    if number < 0:
        return f"minus {number_words(-number)}"
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return TENS[tens] + (f"-{ONES[rest]}" if rest else "")
    size, name = next(scale for scale in SCALES if scale[0] <= number)
    count, rest = divmod(number, size)
    return f"{number_words(count)} {name}" + (f" {number_words(rest)}" if rest else "")


def ordinal_words(number: int) -> str:
    """Return an ordinal in words: twenty-first."""
    head, separator, last = re.fullmatch(r"(?:(.*)([ -]))?(.*)", number_words(number)).groups("")  # type: ignore[union-attr]
    regular = f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th"
    return f"{head}{separator}{IRREGULAR_ORDINALS.get(last, regular)}"


def year_words(year: int) -> str:
    """Return a year in words: nineteen ninety-nine, two thousand five, twenty twenty-four, nineteen hundred."""
    century, rest = divmod(year, 100)
    if century % 10 == 0 and rest < 10:
        return number_words(year)
    if rest == 0:
        return f"{number_words(century)} hundred"
    return f"{number_words(century)} {'oh ' if rest < 10 else ''}{number_words(rest)}"


@functools.cache
def _english_rules() -> list[tuple[re.Pattern[str], Any]]:
    """Return patterns in the order in which they are applied, more specific ones first."""
    currency = "".join(map(re.escape, CURRENCIES))
    units = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
    short_months = {month[:3]: month for month in MONTHS} | {"Sept": "September"}
    rules = [
        (r"[‘’]", "'"),
        (rf"\b({'|'.join(ENGLISH_ABBREVIATIONS)})\.", lambda m: ENGLISH_ABBREVIATIONS[m[1]]),
        (r"\bSt\. (?=[A-Z])", "Saint "),
        (r"\bNo\. ?(?=\d)|#(?=\d)", "number "),
        (r"\be\.g\.", "for example"),
        (r"\bi\.e\.", "that is"),
        (rf"\b({'|'.join(short_months)})\.? (?=\d)", lambda m: f"{short_months[m[1]]} "),
        (rf"([{currency}]) ?({NUMBER})(?: (thousand|million|billion|trillion)\b)?", _money),
        (r"\b(\d{1,2}):(\d{2})\b(?: ?([aApP])\.?[mM]\b\.?)?", _time),
        (r"\b(\d{1,2}) ?([aApP])\.?[mM]\b\.?", _time),
        (rf"({MONTH}) (\d{{1,2}})(?:st|nd|rd|th)?\b(?!:)", lambda m: f"{m[1]} {ordinal_words(int(m[2]))}"),
        (rf"\b(\d{{1,2}})(?:st|nd|rd|th)? (?=(?:of )?{MONTH})", lambda m: f"the {ordinal_words(int(m[1]))} of "),
        (r"\bthe the\b", "the"),
        (r"\bof of\b", "of"),
        (r"\b(\d{1,3}(?:,\d{3})*|\d+)(?:st|nd|rd|th)\b", lambda m: ordinal_words(_integer(m[1]))),
        (r"\b(1[1-9]|20)(\d)0s\b", lambda m: _plural(year_words(int(f"{m[1]}{m[2]}0")))),
        (r"'?\b([2-9])0s\b", lambda m: _plural(TENS[int(m[1])])),
        (r"\b\+?\d{3}(?:[ .-]\d{3})?-\d{4}\b|(?<![\w,.])0\d+\b(?![.,]\d)", lambda m: _digits(m[0])),
        (r"(?<![\w,])\d+(?:\.\d+){2,}", lambda m: " dot ".join(map(_number, m[0].split(".")))),
        (rf"(?<![\w.-])({'|'.join(FRACTIONS)})(?![\w/])", lambda m: FRACTIONS[m[1]]),
        (rf"(?<![\w-])({NUMBER}) ?[-–] ?(?={NUMBER})", lambda m: f"{_number(m[1])} to "),
        (rf"(?<![\w.,])(-?)({NUMBER}) ?({units})(?![\w/])", _measured),
        (r"(?<![\w,.-])(1[1-9]\d\d|20\d\d)(?![\w,]\d|\w|\.\d)", lambda m: year_words(int(m[1]))),
        (rf"(?<![\w])-({NUMBER})", lambda m: f"minus {_number(m[1])}"),
        (rf"(?<=[A-Za-z])-?({NUMBER})(?=[A-Za-z])", lambda m: f" {_number(m[1])} "),
        (rf"(?<=[A-Za-z])-?({NUMBER})", lambda m: f" {_number(m[1])}"),
        (rf"({NUMBER})(?=[A-Za-z])", lambda m: f"{_number(m[1])} "),
        (rf"({NUMBER})", lambda m: _number(m[1])),
        (
            rf"\b(World War|[Cc]hapter|[Pp]art|[Aa]ct|[Vv]olume) ({'|'.join(ROMAN)})\b",
            lambda m: f"{m[1]} {number_words(ROMAN[m[2]])}",
        ),
        (r" ?([&+=@]) ?", lambda m: f" {SYMBOLS[m[1]]} "),
    ]
    return [(re.compile(pattern), replace) for pattern, replace in rules]


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


def _number(digits: str) -> str:
    whole, _, fraction = digits.partition(".")
    if len(whole) > 15:
        return _digits(digits)
    return number_words(_integer(whole)) + (f" point {_digits(fraction)}" if fraction else "")


def _digits(text: str) -> str:
    return " ".join("oh" if digit == "0" else ONES[int(digit)] for digit in text if digit.isdigit())


def _plural(words: str) -> str:
    last = words.split()[-1].split("-")[-1]
    if last in PLURALS:
        return words.removesuffix(last) + PLURALS[last]
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}s"


def _counted(count: str, noun: str) -> str:
    head, _, tail = noun.partition(" ")
    name = head if count in ("1", "one") else _plural(head)
    return f"{name} {tail}".strip()


def _measured(match: re.Match[str]) -> str:
    return f"{'minus ' if match[1] else ''}{_number(match[2])} {_counted(match[2], UNITS[match[3]])}"


def _money(match: re.Match[str]) -> str:
    unit, cents = CURRENCIES[match[1]]
    whole, _, fraction = match[2].partition(".")
    if match[3]:
        return f"{_number(match[2])} {match[3]} {_plural(unit)}"
    if len(fraction) != 2:
        return f"{_number(match[2])} {_counted(match[2], unit)}"
    parts = [f"{number_words(_integer(whole))} {_counted(whole, unit)}"] if _integer(whole) or fraction == "00" else []
    parts += [f"{number_words(int(fraction))} {_counted(fraction.lstrip('0'), cents)}"] if fraction != "00" else []
    return " and ".join(parts)


def _time(match: re.Match[str]) -> str:
    hour, *minute, half = match.groups()
    minutes = int(minute[0]) if minute else None
    if int(hour) > 24 or (minutes or 0) > 59:
        return match[0]
    half_day = f" {half.lower()} m" if half else ""
    if not minutes:
        return number_words(int(hour)) + (half_day or (" o'clock" if minutes == 0 else ""))
    return f"{number_words(int(hour))} {'oh ' if minutes < 10 else ''}{number_words(minutes)}{half_day}"


@functools.cache
def _vietnamese_normalizer() -> Any:
    return import_optional("sea_g2p", "pip install sea-g2p").Normalizer()
