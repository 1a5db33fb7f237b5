"""Answers of the kinds that models give, written for these tests: right, wrong, odd, empty."""

# ruff: noqa: E501

PROSE = [
    "",
    "   \n ",
    "My answer is yes.",
    "My answer is maybe. I could not find more in the text.",
    "The bridge was closed on Monday. Dr. Weber, who lives nearby, said it was not safe! Was it? Yes.",
    "First, we went to the market. Then we met Mr. Novak at 10 a.m. on the corner of St. James Street. "
    "He works for Acme Inc. and knows the U.S. market well. We talked about prices, e.g. of apples.",
    "THE HARBOUR IS OPEN ALL YEAR AND EVERYONE IS WELCOME THERE.",
    "the harbour is open all year and everyone is welcome there. please bring your friends along.",
    "Die Brücke ist seit Montag geschlossen, und niemand weiß, wann sie wieder geöffnet wird.",
    "Le pont est fermé depuis lundi, et personne ne sait quand il sera rouvert au public.",
    "Мост закрыт с понедельника, и никто не знает, когда он снова откроется.",
    "पुल सोमवार से बंद है और कोई नहीं जानता कि यह फिर कब खुलेगा।",
    "El puente está cerrado desde el lunes y nadie sabe cuándo se volverá a abrir.",
    "12345 67890",
    "<<A Night at the Harbour>>\n\nThe lamps were lit. Nobody spoke.\n\nP.S. Bring a coat.",
    "<< >>\nNo title here, really.",
    "* one\n* two\n* three",
    "- apples\n- pears\n\nThat is all I have.\n  - and one nested point",
    "Intro.\n\n* **First point** is important\n* *Second* point\n* third\n\nDone.",
    "Some *highlighted words* and **more of them** in a row, and * * nothing, and ** **.",
    "*a* *b* *c*",
    "Section 1\nThe beginning.\nSection 2\nThe middle.\nSection 3\nThe end.",
    "SECTION 1 loud\nSECTION 2 louder",
    "One paragraph.\n***\nTwo paragraphs.\n***\nThree.",
    "***\nOnly this.\n***",
    "One.\n***\n\n***\nThree.",
    "Harbour life is slow.\n\nBoats come and go.\n\nThe end of it.",
    "\"Harbour\" is a word.\n\n'Boats, mostly' she said.\n\nWhat a day!",
    "Weather was fine.\n\n\n\nHarbour was full.",
    '{"name": "harbour", "boats": [1, 2, 3]}',
    '```json\n{"open": true}\n```',
    "```\n[1, 2]\n```",
    'Here is the JSON: {"a": 1}',
    "{'a': 1}",
    "Answer one is here.\n******\nAnswer two is different.",
    "Same.\n******\nSame.",
    "******\nOne\n******\nTwo\n******",
    "One\n******\n\n******\nTwo",
    '"All of this is quoted, from the first mark to the last."',
    '"Only the start is quoted',
    "Dear [name], we meet at [place] on [date]. Bring [item].",
    "Dear [name],\nsee you.\n\np.s. I forgot: bring bread.",
    "Text.\n\nP.P.S. And another thing.",
    "Text.\n\np. p. s. and another thing",
    "NASA and ESA met in ROME; the U.S. delegation said OK. I agree, A-OK, DON'T I?",
    "I am A to Z.",
    "Write a poem about a harbour. The harbour sleeps, the harbour wakes.",
    "  write a poem about a harbour.\nNo.",
    "The harbour, the harbour and the Harbour again; harboured ships, too.",
    "Nothing here but water water everywhere; ships were sinking. Is there anything else I can help with?",
    "Is there anything else I can help with",
    '"We hope you agree with us. Is there anything else I can help with?"',
    "1. Buy bread.\n2. Walk the dog.\n3. call home\n\nWait... what? Well... The rest is silence.",
    'He said "Stop!" and left. (It was late.) She stayed until 5 p.m. The lights went out... then on.',
    "It costs $3.50 per kg. See fig. 3 for details. Prof. A. B. Miller vs. Dr. C. Jones: who wins?",
    "word " * 60,
    "No commas at all in this short text.",
    "A, b, c.",
    "Good morning!\n\nHow are you?\n\nFine.\n\nGoodbye!",
    "zzz zzz zzz zz z",
]

KINDS: dict[str, list[dict[str, object]]] = {
    "keywords:existence": [{"keywords": ["harbour"]}, {"keywords": ["boats", "harbour"]}],
    "keywords:frequency": [
        {"keyword": "harbour", "frequency": 2, "relation": "at least"},
        {"keyword": "water ", "frequency": 2, "relation": "less than"},
    ],
    "keywords:forbidden_words": [{"forbidden_words": ["harbour", "ships"]}],
    "keywords:letter_frequency": [
        {"letter": "z", "let_frequency": 3, "let_relation": "at least"},
        {"letter": "E", "let_frequency": 5, "let_relation": "less than"},
    ],
    "language:response_language": [{"language": x} for x in ("de", "fr", "ru", "hi", "en", "es")],
    "length_constraints:number_sentences": [
        {"num_sentences": n, "relation": r} for n in (2, 3, 4, 6) for r in ("at least", "less than")
    ],
    "length_constraints:number_paragraphs": [{"num_paragraphs": n} for n in (1, 2, 3)],
    "length_constraints:number_words": [
        {"num_words": 10, "relation": "at least"},
        {"num_words": 60, "relation": "less than"},
    ],
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": 3, "nth_paragraph": 1, "first_word": "Harbour"},
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "boats"},
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "harbour"},
    ],
    "detectable_content:number_placeholders": [{"num_placeholders": 3}, {"num_placeholders": 1}],
    "detectable_content:postscript": [
        {"postscript_marker": "P.S."},
        {"postscript_marker": "P.P.S"},
    ],
    "detectable_format:number_bullet_lists": [{"num_bullets": 3}, {"num_bullets": 1}],
    "detectable_format:constrained_response": [{}],
    "detectable_format:number_highlighted_sections": [
        {"num_highlights": 2},
        {"num_highlights": 4},
    ],
    "detectable_format:multiple_sections": [
        {"section_spliter": "Section", "num_sections": 3},
        {"section_spliter": "SECTION", "num_sections": 2},
    ],
    "detectable_format:json_format": [{}],
    "detectable_format:title": [{}],
    "combination:two_responses": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": "Write a poem about a harbour."}],
    "startend:end_checker": [
        {"end_phrase": "Is there anything else I can help with?"},
        {"end_phrase": "The end."},
    ],
    "startend:quotation": [{}],
    "change_case:capital_word_frequency": [
        {"capital_frequency": 4, "capital_relation": "at least"},
        {"capital_frequency": 2, "capital_relation": "less than"},
    ],
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "punctuation:no_comma": [{}],
}

REFERENCES = ["18", "1,234", "-3", "0.5", "42"]
NUMBERS = [
    "", "none at all", "so it is\n#### 1,234", "#### 1234", "#### -3", "the answer is -3",
    "18", "$18", "$18.", "18.", "18.00", "It costs $18.00", "18 dollars", "18%", "first 7, then 18",
    "18 apples and 2 pears", "Therefore 9 + 9 = 18.", "**18**", "\\boxed{18}", "x=18;", "#### 18\n",
    "1234", "1,234.", "1,234.0", "12,34", "1 234", "-3.", "- 3", "−3", "3", "0.5", ".5", "0.50",
    "1/2", "half of it: 0.5", "42!", "answer: 42 (forty-two)", "4 2", "42\n\nCheck: 6 x 7 = 42",
    "...", "$", "It is 42, I think, or 42.", "#### 42 #### 18", "a1b2c3", "1,,2", "$1,234",
]  # fmt: skip

CODE = [
    {
        "task_id": "Own/0",
        "prompt": 'def double(x):\n    """Twice x."""\n',
        "entry_point": "double",
        "test": "def check(f):\n    assert f(2) == 4\n    assert f(-1) == -2\n",
        "answers": [
            "    return 2 * x\n", "    return x + x\n\n", "    return 3 * x\n", "", "    return\n",
            "    return 2 * x\n```\nThis doubles it.", "  return (\n", "    raise ValueError(x)\n",
            "    import sys\n    sys.exit(0)\n", "    y = x\n    while y < 5:\n        y = y\n    return y\n",
        ],
    },
    {
        "task_id": "Own/1",
        "prompt": "from typing import List\n\n\ndef largest(xs: List[int]) -> int:\n"
        '    """The largest of xs; 0 of none."""\n',
        "entry_point": "largest",
        "test": "def check(f):\n    assert f([1, 5, 2]) == 5\n    assert f([]) == 0\n",
        "answers": [
            "    return max(xs) if xs else 0\n", "    return max(xs)\n", "    return max(xs, default=0)\n",
            "    best = 0\n    for x in xs:\n        best = max(best, x)\n    return best\n",
            "    return sorted(xs)[-1] if xs else None\n", "    pass\n",
        ],
    },
    {
        "task_id": "Own/2",
        "prompt": 'def helper(s):\n    return s[::-1]\n\n\ndef palindrome(s: str) -> bool:\n    """Is s its own reverse?"""\n',
        "entry_point": "palindrome",
        "test": "def check(f):\n    assert f('abba')\n    assert not f('ab')\n    assert f('')\n",
        "answers": [
            "    return s == helper(s)\n", "    return s == s[::-1]\n", "    return True\n",
            "    return s is helper(s)\n", "    return helper(s) == s and len(s) > 0\n", "    assert s\n",
        ],
    },
]  # fmt: skip
