"""A real byte-level BPE tokenizer with a chat template, trained here on words of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from appliance.checkpoint.synth.write import write_json, write_text
from appliance.errors import ApplianceError, UsageError

END, USER, ASSISTANT, SYSTEM, PAD = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>"
SPECIAL = (END, USER, ASSISTANT, SYSTEM, PAD)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORDS = """
the a an of and to in is it that for on with as at by from this be are was not or which has
have can will one two three four five six when where what who how why if then else all each
model expert layer router token memory host card device link bus page block slot table cache
plan place move read write load store copy keep send wait start stop serve answer question
weight scale bit byte word line row column head norm gate up down top first last next most
hot cold warm idle busy fast slow large small wide deep long short near far old new same
other many few more less full empty left right true false good bad clear exact known open
machine engine kernel driver node thread process server client user request stream batch
step time second minute hour day number count rate share part whole sum unit test check
proof error fault reason cause way point side end name list set map file folder path key
value text letter page book river stone tree light night morning water fire wind road city
house door window garden mountain island bridge market story music colour red green blue
"""
SENTENCES_PER_WORD = 4


@cache
def train(vocab_size: int) -> tuple[str, frozenset[int]]:
    """The text of tokenizer.json with exactly `vocab_size` tokens, and the ids to keep quiet.

    Quiet are the special tokens and every token that is not printable ASCII: a random model would
    otherwise print broken characters. The same size gives the same tokenizer.
    """
    try:
        import tokenizers as hf
    except ImportError:
        raise ApplianceError(
            "the Python package tokenizers is missing, which trains a tokenizer",
            fix="pip install tokenizers, or run in the engine's environment",
        ) from None
    bpe = hf.Tokenizer(hf.models.BPE())
    bpe.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = hf.decoders.ByteLevel()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sentences(vocab_size), trainer)
    if bpe.get_vocab_size() != vocab_size:
        raise UsageError(
            f"our words give {bpe.get_vocab_size()} tokens, not {vocab_size}",
            fix="a smaller vocab_size",
        )
    texts = {i: bpe.decode([i], skip_special_tokens=False) for i in range(vocab_size)}
    quiet = {i for i, text in texts.items() if text in SPECIAL or not _is_plain(text)}
    return bpe.to_str(pretty=True), frozenset(quiet)


def folded_size(tokenizer: str) -> int:
    """How many tokens are left when those that read alike are one: case, accents and spaces fold.

    DeepSeek-V4.1 hashes n-grams over these, and refuses a config with another number. Source:
    build_compressed_token_map of vLLM 0.33.0's models/deepseek_v41/common/engram.py.
    """
    import tokenizers as hf

    n = hf.normalizers
    space = "\ue000"  # a token that is one space must not become no text
    fold = n.Sequence(
        [
            *(n.NFKC(), n.NFD(), n.StripAccents(), n.Lowercase()),
            *(n.Replace(hf.Regex(r"[ \t\r\n]+"), " "), n.Replace(hf.Regex(r"^ $"), space)),
            *(n.Strip(), n.Replace(space, " ")),
        ]
    )
    bpe = hf.Tokenizer.from_str(tokenizer)
    keys = set()
    for token in range(bpe.get_vocab_size()):
        text = bpe.decode([token], skip_special_tokens=False)
        # Half of a character has no text to fold.
        keys.add(bpe.id_to_token(token) if "\ufffd" in text else fold.normalize_str(text) or text)
    return len(keys)


def write(folder: Path, tokenizer: str, context: int) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    write_text(folder / "tokenizer.json", tokenizer + "\n")
    ids = {token["content"]: token["id"] for token in json.loads(tokenizer)["added_tokens"]}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        },
    )
    write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": ids[END], "pad_token_id": ids[PAD]},
    )


def _is_plain(text: str) -> bool:
    return text.isascii() and (text.isprintable() or text == "\n")


def _sentences(vocab_size: int) -> Iterator[str]:
    """Text with our words in it often, and made-up ones often enough for any vocabulary."""
    random, known = Random(vocab_size), WORDS.split()
    sounds = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "ol")]
    invented = ["".join(random.choices(sounds, k=3)) for _ in range(vocab_size)]
    for count in range(vocab_size * SENTENCES_PER_WORD):
        words = random.choices(known, k=random.randint(4, 12))
        words.append(invented[count % len(invented)])
        end = random.choices((".", ",", "?", ":", "\n"), weights=(6, 3, 1, 1, 1))[0]
        yield " ".join(words).capitalize() + f" {count % 1000}" * (count % 9 == 0) + end + " "
