"""IFEval: whether an answer follows each instruction of its prompt, by rules and not by a judge.

The kinds of instruction, their arguments and what counts are those of google-research's
`instruction_following_eval` (Zhou et al. 2023, arXiv 2311.07911) as lm-evaluation-harness applies
them in its strict score: an empty answer follows nothing, arguments that are null or 0 are absent.
CHECKS is the list. How many items agree with lm-eval's own scores, and on which kinds they cannot
(those that need a trained sentence splitter): docs/measurements.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from appliance.accuracy.sentences import capital_words, sentences
from appliance.errors import UnsupportedError, UsageError, with_extra

Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
FENCES = ("```json", "```Json", "```JSON", "```")


def follows(answer: str, kinds: Sequence[str], arguments: Sequence[Arguments]) -> list[bool]:
    """One for each instruction. Raises UsageError on a kind that is not known."""
    unknown = sorted(set(kinds) - set(CHECKS))
    if unknown or len(kinds) != len(arguments):
        raise UsageError(
            f"instructions {', '.join(unknown) or 'and their arguments'} do not fit IFEval",
            fix="the file input_data.jsonl of google/IFEval",
        )
    if not answer.strip():
        return [False] * len(kinds)
    given = [{name: value for name, value in each.items() if value} for each in arguments]
    try:
        return [CHECKS[kind](answer, each) for kind, each in zip(kinds, given, strict=True)]
    except KeyError as problem:
        raise UsageError(f"an instruction of IFEval lacks its argument {problem}") from problem


def _compared(count: int, wanted: int, relation: str) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def _is_english(answer: str) -> bool:
    return _language(answer) in ("en", None)


def _language(answer: str) -> str | None:
    """None: it has no letters to tell by, which counts as followed there."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError as problem:
        raise UnsupportedError(
            "this item of IFEval needs to know the language of an answer",
            fix=with_extra("accuracy"),
        ) from problem
    DetectorFactory.seed = 0  # else the same text may get another language tomorrow
    try:
        return str(detect(answer))
    except LangDetectException:
        return None


def _in_language(answer: str, a: Arguments) -> bool:
    return _language(answer) in (a["language"], None)


def _keywords(answer: str, a: Arguments) -> bool:
    return all(re.search(word, answer, re.IGNORECASE) for word in a["keywords"])


def _keyword_frequency(answer: str, a: Arguments) -> bool:
    found = re.findall(a["keyword"].strip(), answer, re.IGNORECASE)
    return _compared(len(found), a["frequency"], a["relation"])


def _forbidden(answer: str, a: Arguments) -> bool:
    words = a["forbidden_words"]
    return not any(re.search(rf"\b{word}\b", answer, re.IGNORECASE) for word in words)


def _letters(answer: str, a: Arguments) -> bool:
    count = Counter(answer.lower())[a["letter"].strip().lower()]
    return _compared(count, a["let_frequency"], a["let_relation"])


def _sentences(answer: str, a: Arguments) -> bool:
    return _compared(len(sentences(answer)), a["num_sentences"], a["relation"])


def _words(answer: str, a: Arguments) -> bool:
    return _compared(len(re.findall(r"\w+", answer)), a["num_words"], a["relation"])


def _paragraphs(answer: str, a: Arguments) -> bool:
    first, *middle = re.split(r"\s?\*\*\*\s?", answer)
    last = [middle.pop()] if middle else []
    if any(not part.strip() for part in middle):
        return False
    count = len(middle) + sum(bool(part.strip()) for part in (first, *last))
    return bool(count == a["num_paragraphs"])


def _first_word(answer: str, a: Arguments) -> bool:
    paragraphs = answer.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if a["nth_paragraph"] > count or not paragraphs[a["nth_paragraph"] - 1].strip():
        return False
    word = paragraphs[a["nth_paragraph"] - 1].split()[0].lstrip("'").lstrip('"')
    word = re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower()
    return bool(count == a["num_paragraphs"] and word == a["first_word"].lower())


def _placeholders(answer: str, a: Arguments) -> bool:
    return bool(len(re.findall(r"\[.*?\]", answer)) >= a["num_placeholders"])


def _postscript(answer: str, a: Arguments) -> bool:
    marker = a["postscript_marker"].strip()
    patterns = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    pattern = patterns.get(marker, rf"\s*{marker.lower()}.*$")
    return re.search(pattern, answer.lower(), re.MULTILINE) is not None


def _bullets(answer: str, a: Arguments) -> bool:
    patterns = (r"^\s*\*[^\*].*$", r"^\s*-.*$")
    count = sum(len(re.findall(pattern, answer, re.MULTILINE)) for pattern in patterns)
    return bool(count == a["num_bullets"])


def _highlights(answer: str, a: Arguments) -> bool:
    single = re.findall(r"\*[^\n\*]*\*", answer)
    double = re.findall(r"\*\*[^\n\*]*\*\*", answer)
    count = sum(bool(found.strip("*").strip()) for found in single)
    count += sum(bool(found[2:-2].strip()) for found in double)
    return bool(count >= a["num_highlights"])


def _sections(answer: str, a: Arguments) -> bool:
    parts = re.split(rf"\s?{a['section_spliter'].strip()}\s?\d+\s?", answer)
    return bool(len(parts) - 1 >= a["num_sections"])


def _json(answer: str, a: Arguments) -> bool:
    text = answer.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except ValueError:
        return False
    return True


def _title(answer: str, a: Arguments) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", answer))


def _two_answers(answer: str, a: Arguments) -> bool:
    parts = answer.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    valid = [part.strip() for part in parts if part.strip()]
    return len(valid) == 2 and valid[0] != valid[1]


def _quoted(answer: str, a: Arguments) -> bool:
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Check] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "language:response_language": _in_language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda t, a: any(o in t for o in OPTIONS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_answers,
    "combination:repeat_prompt": lambda t, a: (
        t.strip().lower().startswith(a["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda t, a: (
        t.strip().strip('"').lower().endswith(a["end_phrase"].strip().lower())
    ),
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": lambda t, a: _compared(
        capital_words(t), a["capital_frequency"], a["capital_relation"]
    ),
    "change_case:english_capital": lambda t, a: t.isupper() and _is_english(t),
    "change_case:english_lowercase": lambda t, a: t.islower() and _is_english(t),
    "punctuation:no_comma": lambda t, a: "," not in t,
}
