"""Sentences of English text, and words in capitals, without trained models.

lm-eval splits with NLTK's Punkt, whose tables come from a corpus that is not ours to ship. This
does the same with rules: `?` and `!` end a sentence, a full stop does unless its word is an
abbreviation or an initial, or a small letter follows a number or an ellipsis.
"""

from __future__ import annotations

import re

# Punkt knows these and, for one, neither "e.g." nor "P.S.".
_SHORT = (
    "mr mrs ms messrs dr prof st vs inc ltd co cos corp bros cie jr sr gen col lt adm maj sen rep "
    "jan feb aug sep sept oct nov dec tues wed fri ave ft yr va fla calif ariz colo conn minn okla "
    "ore tenn wash wis u.s u.k u.n u.s.a d.c a.m p.m ph.d m.b.a n.y"
)
ABBREVIATIONS = frozenset(_SHORT.split())
# After an abbreviation, one of these with a capital begins a sentence.
_SMALL = (
    "the this that these those it its he she we they there here in on at by for from with but and "
    "or so if when while then however although also as after before our their his her my your "
    "some many most all each both what why how where who"
)
STARTERS = frozenset(_SMALL.split())
END = re.compile(r"(\S*?)([.?!]+)(?=[\"')\]}*_]*(?:\s|$)|[\"')\]}*])")
NEXT = re.compile(r"[\"')\]}*_]*\s+(\S+)")
# As NLTK splits words: hyphens, dots and slashes inside a word do not end it.
WORD = re.compile(r"\w+(?:[.\-&/]\w+)*|\S")


def sentences(text: str) -> list[str]:
    """In order, without the space around them."""
    found, start = [], 0
    for match in END.finditer(text):
        following = NEXT.match(text, match.end())
        if _ends(match[1], match[2], following[1] if following else ""):
            close = re.compile(r"[\"')\]}]*(?=\s|$)").match(text, match.end())
            end = close.end() if close else match.end()
            found.append(text[start:end].strip())
            start = end
    return [sentence for sentence in (*found, text[start:].strip()) if sentence]


def capital_words(text: str) -> int:
    """How many words have capitals and no small letters."""
    return sum(word.isupper() for word in WORD.findall(text))


def _ends(word: str, marks: str, following: str) -> bool:
    if not following:
        return True
    if marks[-1] in "?!":
        return True
    word = word.lstrip("\"'([{*_").lower()
    next_word = following.strip("\"'()[]{}*_.,:;!?")
    starts = next_word[:1].isupper() and next_word.lower() in STARTERS
    if len(marks) > 1:  # an ellipsis
        return starts
    if word.rpartition("-")[2] in ABBREVIATIONS:
        return starts
    if re.fullmatch(r"[a-z]", word):  # an initial
        return starts
    if re.fullmatch(r"[\d.,:/]+", word):
        return not next_word[:1].islower()
    return True
