"""A tiny Llama with random weights in transformers' own format, for a server that is not ours.

python tests/peer_model.py DIR
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from appliance.checkpoint.synth import tokenizer

VOCABULARY, CONTEXT = 1024, 4096


def make(folder: Path) -> None:
    folder.mkdir(parents=True)
    text, _ = tokenizer.train(VOCABULARY)
    tokenizer.write(folder, text, CONTEXT)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
