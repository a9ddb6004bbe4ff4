"""Text normalisation by language: transcripts as words and characters for WER and CER.

Only spellings of one sound are made equal. Vietnamese tones stay, since another tone is another word. Arabic vowel
signs are removed, since people rarely write them and ASR models never do.
"""

import functools
import re
import unicodedata
from collections.abc import Callable

UNSPACED = frozenset({"zh", "yue", "ja", "th", "lo", "km", "my"})
"""Languages written without spaces: every character counts as a word."""
DOTLESS_I = frozenset({"tr", "az"})
"""Languages in which I is the capital of ı, and İ that of i."""

TATWEEL = "\u0640"
ARABIC_LETTERS = str.maketrans(
    {"أ": "ا", "إ": "ا", "آ": "ا", "ٱ": "ا", "ى": "ي", "ئ": "ي", "ؤ": "و", "ة": "ه", "ی": "ي", "ک": "ك"}
)
"""Interchangeable letters: forms of alif, ya without dots, hamza on its seats, ta marbuta."""
ARABIC_ENDINGS = {"": 1, "ه": 1, "ون": 10, "ين": 10, "ميه": 100, "مايه": 100}
ARABIC_NUMBERS = {
    **{"صفر": 0, "واحد": 1, "واحده": 1, "احد": 1, "احدي": 1, "ثماني": 8, "ثمانيه": 8},
    **{"اثنان": 2, "اثنين": 2, "اثنتان": 2, "اثنتين": 2, "اثنا": 2, "اثني": 2, "اثنتا": 2},
    **{"عشر": 10, "عشره": 10, "عشرون": 20, "عشرين": 20},
    **{
        f"{stem}{ending}": digit * unit
        for digit, stem in enumerate(["ثلاث", "اربع", "خمس", "ست", "سبع", "ثمان", "تسع"], start=3)
        for ending, unit in ARABIC_ENDINGS.items()
        if (digit, ending) != (8, "ه")  # the irregular one
    },
    **{"ميه": 100, "مايه": 100, "ميتان": 200, "ميتين": 200, "مايتان": 200, "مايتين": 200},
    **{"الف": 1000, "الفا": 1000, "الاف": 1000, "الفان": 2000, "الفين": 2000},
}
"""Values of number words, in both genders and cases, with interchangeable letters made equal."""

VIETNAMESE_DIGITS = ("không", "một", "hai", "ba", "bốn", "năm", "sáu", "bảy", "tám", "chín")
AFTER_TENS = {"mốt": "một", "tư": "bốn", "lăm": "năm", "nhăm": "năm"}
"""Forms of a last digit after tens."""
VIETNAMESE_SPELLINGS = {"ngàn": "nghìn", "bẩy": "bảy"}
TONE_BEFORE = {
    unicodedata.normalize("NFC", first + second + tone): unicodedata.normalize("NFC", first + tone + second)
    for first, second in ("oa", "oe", "uy")
    for tone in "\u0300\u0301\u0309\u0303\u0323"
}
"""Two positions of the tone in one syllable: hoà and hòa are one word."""
TONE_AT_THE_END = re.compile(rf"\b((?:[^\W\d_](?<!q))*)({'|'.join(TONE_BEFORE)})\b")

MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
ENGLISH_ABBREVIATIONS = {
    **{"Mr": "Mister", "Mrs": "Missus", "Ms": "Miz", "Dr": "Doctor", "Prof": "Professor", "Sr": "Senior"},
    **{"Jr": "Junior", "vs": "versus", "etc": "et cetera", "approx": "approximately", "dept": "department"},
    **{"Gen": "General", "Col": "Colonel", "Capt": "Captain", "Sgt": "Sergeant", "Lt": "Lieutenant", "Rev": "Reverend"},
}
"""Spoken forms of abbreviations that end in a full stop."""
ABBREVIATIONS = {
    "en": " ".join(map(str.lower, [*ENGLISH_ABBREVIATIONS, *(month[:3] for month in MONTHS if len(month) > 3)]))
    + " sept hon st mt ft no nos vol fig ch sec art pp est inc ltd co corp ave blvd rd",
    "de": "hr fr dr prof nr bd abs art bzw ca evtl ggf inkl max min mio mrd sog st str tel usw vgl zzt z.b d.h u.a jh",
    "fr": "m mm mme mmes mlle mlles dr pr me st ste no art av bd cf env etc ex p pp vol chap janv févr avr juil sept",
    "es": "sr sra srta sres dr dra d dña ud uds vd vds núm nro art av avda c cap pág págs p ej etc fig gral lic prof",
    "vi": "tp ts ths gs pgs bs ks ls tx tt q p đ st tr sđt ubnd v.v",
    "it": "sig sig.ra dott prof avv ing art cap ecc es fig n pag pp s st vol",
    "pt": "sr sra srta dr dra prof av art cap etc ex fig n núm p pág r st vol",
    "nl": "dhr mevr mw dr drs ir ing prof nr art bijv bv blz ca d.w.z enz evt fig m.b.t o.a str",
    "ru": "г гг ул им т.е т.д т.п др пр см стр рис руб тыс млн млрд",
}
"""Words before a full stop that does not end a sentence, by language."""


def base_language(language: str) -> str:
    """Return the language without its region: `pt` for `pt-BR`."""
    return re.split(r"[-_]", language.strip().casefold())[0]


def words(text: str, language: str = "en") -> list[str]:
    """Return normalised words for WER. English uses Whisper's normaliser: 3 and three, I'm and I am, Mr and mister are
    equal.

    In other languages case and punctuation do not count, and digits become ASCII. Arabic and Vietnamese have rules of
    their own, also for numbers; elsewhere a number in digits differs from the number in words.
    """
    base = base_language(language)
    normalized = unicodedata.normalize("NFKC", text).replace("’", "'").replace("‘", "'")
    if base == "en":
        # Whisper's normaliser drops bracketed text as a remark, but a speaker reads it.
        normalized = _english()("".join(" " if symbol in "()[]{}<>" else symbol for symbol in normalized))
        return [word for part in normalized.split() if (word := part.strip("'.")) and any(map(str.isalnum, word))]
    if base in DOTLESS_I:
        normalized = normalized.replace("İ", "i").replace("i\u0307", "i").replace("I", "ı")
    folded = unicodedata.normalize("NFC", normalized.casefold())
    normalized = "".join(str(unicodedata.decimal(symbol)) if symbol.isdecimal() else symbol for symbol in folded)
    if base in ("ar", "vi"):
        normalized = re.sub(r"(?<=\d)[.,٬](?=\d{3}(?!\d))", "", normalized)  # separators of thousands
    if base == "ar":
        bare = (symbol for symbol in normalized if symbol != TATWEEL and not _is_mark(symbol))
        normalized = "".join(bare).translate(ARABIC_LETTERS)
    kept = (symbol if symbol.isalnum() or symbol == "'" or _is_mark(symbol) else " " for symbol in normalized)
    tokens = [word for part in "".join(kept).split() if (word := part.strip("'"))]
    if base in UNSPACED:
        return [letter for word in tokens for letter in clusters(word) if letter.strip("'")]
    if base == "ar":
        return _arabic_numbers(tokens)
    return _vietnamese(tokens) if base == "vi" else tokens


def letters(text: str, language: str = "en") -> list[str]:
    """Return normalised characters for CER, with spaces between words."""
    joined = ("" if base_language(language) in UNSPACED else " ").join(words(text, language))
    return list(unicodedata.normalize("NFC", joined))


def alphanumeric(text: str) -> str:
    """Return casefolded letters and digits alone, for equality of texts across languages.

    The leak check of a split uses this and not `words`: it must join all spellings that differ in punctuation or
    spacing, and `words` keeps some of them apart ("im" and "I'm", "e-mail" and "email") and needs the right language.
    Vowel signs of Arabic and Hebrew do not count, nor do forms of Arabic letters, nor the dot of a Turkish i. Marks of
    the scripts of India and South East Asia do: they are vowels and tones that are always written.
    """
    folded = unicodedata.normalize("NFKC", text).casefold().translate(ARABIC_LETTERS).replace("ı", "i")
    return "".join(
        symbol
        for symbol in folded
        if (symbol.isalnum() and symbol != TATWEEL) or ("\u0900" <= symbol <= "\u1cff" and _is_mark(symbol))
    )


@functools.cache
def _english() -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normalizer: Callable[[str], str] = EnglishTextNormalizer({})
    return normalizer


def _is_mark(symbol: str) -> bool:
    """Tell whether a symbol belongs to the letter before it: a tone or a vowel sign."""
    return unicodedata.category(symbol).startswith("M")


def clusters(text: str) -> list[str]:
    """Return the characters with the marks and format characters that belong to each."""
    pieces: list[str] = []
    for symbol in text:
        if pieces and (_is_mark(symbol) or unicodedata.category(symbol) == "Cf"):
            pieces[-1] += symbol
        else:
            pieces.append(symbol)
    return pieces


def _arabic_numbers(tokens: list[str]) -> list[str]:
    """Replace numbers in words by digits: 'ثلاثه وعشرون' is 23. Parts after the first begin with `and`."""
    converted: list[str] = []
    position = 0
    while position < len(tokens):
        value = ARABIC_NUMBERS.get(tokens[position])
        if value is None:
            converted.append(tokens[position])
            position += 1
            continue
        total, group, last = 0, 0, 0
        while value is not None:
            if value == 1000 and group:
                total, group = total + group * 1000, 0
            elif value == 100 and 3 <= last <= 9:
                group += 99 * last  # the digit before it has been counted once
            else:
                group += value
            last = value
            position += 1
            value = _next_number(tokens, position, last)
        converted.append(str(total + group))
    return converted


def _next_number(tokens: list[str], position: int, last: int) -> int | None:
    """Return what the next word adds to the current number, or None if that number has ended."""
    if position == len(tokens):
        return None
    word = tokens[position]
    value = ARABIC_NUMBERS.get(word)
    # Without `and` only ten follows a digit (thirteen), and hundred or thousand follow what they multiply.
    if value is not None and ((value == 10 and last < 10) or (value == 100 and last < 10) or value == 1000 != last):
        return value
    value = ARABIC_NUMBERS.get(word[1:]) if word.startswith("و") else None
    if value is None:
        return None
    # After `and`, tens follow a digit, and smaller numbers follow hundreds and thousands.
    return value if (20 <= value < 100 if last < 10 else last >= 100 and value < min(last, 1000)) else None


def _vietnamese(tokens: list[str]) -> list[str]:
    spelled = [part for word in tokens for part in (_vietnamese_number(word) if word.isdecimal() else [word])]
    converted: list[str] = []
    for word in spelled:
        previous = converted[-1] if converted else ""
        if previous in ("mươi", "mười") and word in AFTER_TENS:
            word = AFTER_TENS[word]
        elif word == "lẻ" and previous in ("trăm", "nghìn"):
            word = "linh"
        word = VIETNAMESE_SPELLINGS.get(word, word)
        converted.append(TONE_AT_THE_END.sub(lambda match: match[1] + TONE_BEFORE[match[2]], word))
    return converted


def _vietnamese_number(digits: str) -> list[str]:
    """Return digits as they are read. Very long numbers, and those that begin with zero, are read digit by digit."""
    if len(digits) > 9 or (len(digits) > 1 and digits.startswith("0")):
        return [VIETNAMESE_DIGITS[int(digit)] for digit in digits]
    number, read = int(digits), list[str]()
    for size, name in ((10**6, "triệu"), (10**3, "nghìn"), (1, "")):
        group, number = divmod(number, size)
        if group or (size == 1 and not read):
            read += [*_vietnamese_group(group, full=bool(read)), *([name] if name else [])]
    return read


def _vietnamese_group(number: int, *, full: bool) -> list[str]:
    """Return a number up to 999 in words; `full` reads its zeros too, after a larger group."""
    hundreds, tens, last = number // 100, number // 10 % 10, number % 10
    read = [VIETNAMESE_DIGITS[hundreds], "trăm"] if hundreds or full else []
    if tens == 1:
        read.append("mười")
    elif tens:
        read += [VIETNAMESE_DIGITS[tens], "mươi"]
    elif last and read:
        read.append("linh")
    if last or not read:
        read.append(VIETNAMESE_DIGITS[last])
    return read


def normalise_text(text: str) -> str:
    """Return text as NFC on one line, without surrounding blanks. Diacritics, case and direction stay."""
    return " ".join(unicodedata.normalize("NFC", text).split())
