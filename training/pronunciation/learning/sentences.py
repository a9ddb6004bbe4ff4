"""Sentences to read: enough to hold some out, of words that espeak and ARPAbet agree on."""

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
HELD_OUT = 10
"""One sentence in so many is never learned from."""
FRAGMENTS, FRAGMENT_WORDS = 0.4, (1, 1, 2, 2, 3)
"""Share of what is learned from that is only a few words of a sentence, and how many. In them a model that knows
nothing finds out sooner which phone belongs to which stretch of sound."""


def sentence(dice: random.Random) -> str:
    def one(kind: str) -> str:
        return dice.choice(WORDS[kind].split(","))

    who = f"the {one('described')} {one('people')}" if dice.random() < 0.7 else dice.choice(["we", "they"])
    what = f"the {one('things')}" if dice.random() < 0.6 else f"the {one('described')} {one('things')}"
    return " ".join([who, one("did"), what, *([one("when")] if dice.random() < 0.4 else [])])


def is_held_out(text: str) -> bool:
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0] % HELD_OUT == 0


def draw(dice: random.Random, *, held_out: bool) -> str:
    """A sentence to be learned from, or a few words of it; or a whole one that never is."""
    while True:
        text = sentence(dice)
        if is_held_out(text) == held_out:
            return text if held_out or dice.random() >= FRAGMENTS else fragment(text, dice)


def fragment(text: str, dice: random.Random) -> str:
    words = text.split()
    count = min(dice.choice(FRAGMENT_WORDS), len(words))
    start = dice.randint(0, len(words) - count)
    return " ".join(words[start : start + count])
