"""Random sentences, of words whose phones exist in both eSpeak and ARPAbet."""

from __future__ import annotations

import hashlib
import random

WORDS = {
    "described": "small,happy,young,clever,quiet,little,yellow,old,lazy,big,brave,hungry,tired,white,strong,kind",
    "people": "teacher,children,doctor,mother,brother,farmer,singer,driver,girl,boy,dog,cat,bird,horse,rabbit,king",
    "did": "found,watched,carried,liked,touched,called,followed,washed,painted,needed,visited,forgot,measured,broke",
    "things": "river,garden,table,window,kitchen,mountain,orange,flower,letter,picture,bottle,basket,money,church",
    "when": "today,tomorrow,yesterday,again,together,in the morning,after lunch,on Monday,very slowly,with pleasure",
}
ONE_HELD_OUT_IN = 10
"""One sentence in so many is never trained on."""
FRAGMENT_SHARE, FRAGMENT_WORDS = 0.4, (1, 1, 2, 2, 3)
"""Share of training texts that are a few words of a sentence, and how many words. A model with random weights learns
the alignment of phones and audio sooner from them."""


def random_sentence(rng: random.Random) -> str:
    def word(kind: str) -> str:
        return rng.choice(WORDS[kind].split(","))

    subject = f"the {word('described')} {word('people')}" if rng.random() < 0.7 else rng.choice(["we", "they"])
    object = f"the {word('things')}" if rng.random() < 0.6 else f"the {word('described')} {word('things')}"
    return " ".join([subject, word("did"), object, *([word("when")] if rng.random() < 0.4 else [])])


def is_held_out(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % ONE_HELD_OUT_IN == 0


def draw_sentence(rng: random.Random, *, held_out: bool) -> str:
    """A training sentence, or a few words of it; or a whole held-out one."""
    while True:
        text = random_sentence(rng)
        if is_held_out(text) == held_out:
            return text if held_out or rng.random() >= FRAGMENT_SHARE else fragment(text, rng)


def fragment(text: str, rng: random.Random) -> str:
    words = text.split()
    count = min(rng.choice(FRAGMENT_WORDS), len(words))
    start = rng.randint(0, len(words) - count)
    return " ".join(words[start : start + count])
