"""Texts of several lengths, a tokenizer trained on them, and tiny language models of them."""

import random

WORDS = [
    *(
        "the",
        "a",
        "cat",
        "dog",
        "sat",
        "ran",
        "on",
        "under",
        "red",
        "blue",
        "mat",
        "tree",
        "and",
        "then",
        "it",
    ),
    *("was", "very", "fast", "slow", "old", "new"),
]


def sentences(n, seed=0, least=2, most=12):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(least, most))) for _ in range(n)]


def word_tokenizer(pad="[PAD]"):
    """Return a fast tokenizer of whole words, as transformers has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[EOS]"] + ([pad] if pad else [])
    trainer = trainers.WordLevelTrainer(special_tokens=special)
    tokenizer.train_from_iterator(sentences(200), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]", pad_token=pad, model_max_length=64
    )


def gpt2_config(tokenizer, **changes):
    from transformers import GPT2Config

    words = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": len(tokenizer)}
    return GPT2Config(**{**words, **sizes, **changes})
