"""Consent sentences: what a speaker reads aloud, with their name and two words of the day."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rapidfuzz import fuzz
from rapidfuzz.distance import Levenshtein

from myna.core.errors import ConfigError
from myna.core.user_folders import private_file, user_folder
from myna.text.normalization import base_language, letters

SECRET_FILE = "consent-words.key"
VALID_DAYS = 2
"""Sentences of so many days are accepted, today's included: a recording may be made before midnight."""
MIN_NAME_MATCH = 60
"""Likeness, of 100, of a name with what was recognised: names have many spellings."""
MAX_NAME_ERRORS = 2
"""Letters that may differ in any case: recognisers write Lee for Li."""

SENTENCES = {
    "en": "My name is {name}. I agree that a computer learns my voice from my recordings and speaks with it. "
    "My two words today are {first} and {second}.",
    "ar": "اسمي {name}. أوافق على أن يتعلم الحاسوب صوتي من تسجيلاتي وأن يتكلم به. كلمتاي اليوم هما {first} و {second}.",
    "vi": "Tôi tên là {name}. Tôi đồng ý để máy tính học giọng nói của tôi từ các bản ghi âm và nói bằng giọng ấy. "
    "Hai từ của tôi hôm nay là {first} và {second}.",
    "de": "Mein Name ist {name}. Ich bin einverstanden, dass ein Computer meine Stimme aus meinen Aufnahmen lernt und "
    "mit ihr spricht. Meine zwei Wörter heute sind {first} und {second}.",
    "fr": "Je m'appelle {name}. J'accepte qu'un ordinateur apprenne ma voix à partir de mes enregistrements et parle "
    "avec elle. Mes deux mots d'aujourd'hui sont {first} et {second}.",
    "es": "Me llamo {name}. Acepto que un ordenador aprenda mi voz de mis grabaciones y hable con ella. "
    "Mis dos palabras de hoy son {first} y {second}.",
}
WORDS = {
    "en": "anchor apple basket blanket bridge butter candle castle chicken copper cotton desert dinner engine feather "
    "finger forest garden guitar hammer harbor island jacket kitchen ladder lemon market meadow mirror mountain "
    "orange paper pencil pepper picture pillow pocket rabbit ribbon river saddle shadow silver spider sugar summer "
    "table ticket tiger tunnel valley velvet window winter yellow",
    "ar": "باب بحر بستان تفاح جبل جسر حديقة حصان خبز دفتر ذهب رمان زيتون سحاب سفينة سمكة شجرة شمس صحراء طائر عسل عصفور "
    "غابة فراشة قطار قلم قمر قهوة كتاب كرسي ليمون مدينة مطر مفتاح ملح نافذة نجمة نخلة نهر وردة",
    "vi": "bánh biển bóng cầu chuối cửa dừa đèn đường ghế giấy gió gương hoa hồ khăn lá lúa mây mèo mưa nắng ngựa nhà "
    "nón núi quạt rừng sách sao sen sông sữa thuyền trà trăng vườn xoài vịt",
    "de": "Anker Apfel Blume Brücke Butter Decke Feder Fenster Garten Gitarre Hafen Hammer Himmel Insel Jacke Kerze "
    "Kirsche Kissen Koffer Küche Lampe Leiter Löffel Markt Pfeffer Regen Sommer Spiegel Tasche Teller Wasser "
    "Vogel Winter Wolke Zucker Zwiebel",
    "fr": "abeille bateau beurre bougie bouteille camion cerise chapeau château cheval citron couteau cuisine écharpe "
    "étoile fenêtre forêt fromage guitare jardin journal lapin lumière marteau montagne nuage orange panier poisson "
    "rivière soleil sucre table tortue valise voisin",
    "es": "abeja bosque botella caballo camino campana cereza cocina cuchara espejo estrella flor fuego guitarra "
    "hierro isla jardín leche limón lluvia manzana martillo mesa montaña naranja papel pimienta playa puente queso "
    "reloj sombra tigre ventana verano zapato",
}


@dataclass(frozen=True, slots=True)
class ConsentSentence:
    """A sentence to be read aloud, and what in it cannot be in an older recording."""

    text: str
    name: str
    language: str
    words: tuple[str, str]
    day: str
    """In UTC, as 2026-11-17."""


def sentence_of_day(name: str, language: str, day: datetime | None = None) -> ConsentSentence:
    """The sentence of a day, today's by default: the same all day on one machine, and not to be guessed elsewhere."""
    base = base_language(language)
    if base not in SENTENCES:
        raise ConfigError(
            f"there is no consent sentence in `{language}`",
            hint=f"use one that the speaker reads: {', '.join(SENTENCES)}",
        )
    stamp = (day or datetime.now(UTC)).strftime("%Y-%m-%d")
    first, second = _random_words(f"{stamp}\n{name}\n{base}", WORDS[base].split())
    text = SENTENCES[base].format(name=name, first=first, second=second)
    return ConsentSentence(text, name, base, (first, second), stamp)


def valid_sentences(name: str, language: str) -> list[ConsentSentence]:
    """The sentences that are accepted now, today's first."""
    now = datetime.now(UTC)
    return [sentence_of_day(name, language, now - timedelta(days=age)) for age in range(VALID_DAYS)]


def has_name(transcript: str, name: str, language: str) -> bool:
    """Whether a name, as spelled or nearly so, is recognised in the name's place, not elsewhere in the sentence."""
    greeting, agreement, *_ = re.split("{name}|{first}", SENTENCES[base_language(language)])
    said, expected, before, after = (
        "".join(letters(text, language)) for text in (transcript, name, greeting, agreement)
    )
    if end := fuzz.partial_ratio_alignment(after, said):
        said = said[: end.dest_start]
    if start := fuzz.partial_ratio_alignment(before, said):
        said = said[start.dest_end :]
    said = said.strip()
    return fuzz.ratio(expected, said) >= MIN_NAME_MATCH or Levenshtein.distance(expected, said) <= MAX_NAME_ERRORS


def _random_words(seed: str, words: list[str]) -> tuple[str, str]:
    secret = private_file(user_folder("config") / SECRET_FILE, secrets.token_bytes(32))
    number = int.from_bytes(hmac.digest(secret, seed.encode(), hashlib.sha256), "big")
    first = words.pop(number % len(words))
    return first, words[(number >> 64) % len(words)]
