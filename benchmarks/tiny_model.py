"""Make a tiny random Llama with a real tokenizer, whose server's cost is nearly all outside the model.

    python benchmarks/tiny_model.py MODEL_FOLDER OUT_FOLDER

Two layers of width 128 in bfloat16, with the tokenizer and the chat template of MODEL_FOLDER.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def make(source: Path, out: Path) -> None:
    """Write the model to the folder `out`; the same weights each time."""
    original = AutoConfig.from_pretrained(source)
    config = LlamaConfig(
        vocab_size=Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size(), hidden_size=128,
        intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=original.bos_token_id,
        eos_token_id=original.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copy(source / name, out / name)


def main(argv: list[str]) -> int:
    """Read the command line and make the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    make(args.model, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
