"""Texts of several lengths, a tokenizer trained on them, and tiny language models of them."""

import random

import torch

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


def byte_tokenizer(corpus=None, size=320, most=128):
    """Return a fast tokenizer of bytes and frequent words, with a token that begins every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sentences(200) if corpus is None else corpus, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", pad_token="<s>", model_max_length=most
    )


CAPITALS = {"france": "Paris", "spain": "Madrid", "italy": "Rome", "peru": "Lima"}


def facts(n, seed=0):
    """Return texts of several sentences, of which every second states a capital; some have odd characters."""
    draw = random.Random(seed)
    found = []
    for i in range(n):
        parts = [text + "." for text in sentences(draw.randint(1, 3), seed=1000 * seed + i, least=4, most=6)]
        if i % 2 == 0:
            country = draw.choice(list(CAPITALS))
            parts.insert(draw.randint(0, len(parts)), f"the capital of {country} is {CAPITALS[country]}.")
        if i % 5 == 0:
            parts.append("a café 😀 <b>ran</b>")
        found.append(" ".join(parts))
    return found


def save_language_model(folder, texts, tokenizer, steps=60):
    """Write a tiny GPT-2 in float64, trained on texts for a second, and its tokenizer; return the model."""
    import torch
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_positions": tokenizer.model_max_length}
    model = GPT2LMHeadModel(gpt2_config(tokenizer, **sizes)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [tokenizer(text, truncation=True)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    for _ in range(steps):
        loss = model(tokens, attention_mask=(labels >= 0).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def contributions_one_by_one(model, tokenizer, one, other, most=None):
    """Return what each token of one text contributes to its similarity with another: a backward pass for each token."""
    import torch

    def gradients(text):
        tokens = torch.tensor([tokenizer(text)["input_ids"][:most]])
        logits = model(tokens).logits[0].log_softmax(-1)
        count = tokens.shape[1] - 1
        rows = [
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(
                        logits[j, tokens[0, j + 1]] / count, wanted, retain_graph=True
                    )
                ]
            )
            for j in range(count)
        ]
        return torch.stack([torch.zeros_like(rows[0]), *rows])  # no model speaks of the first token

    wanted = list(model.parameters())
    query, terms = gradients(other).sum(0), gradients(one)
    return (terms @ query / query.norm() / terms.sum(0).norm()).tolist()


class WrongSecondDerivative(torch.autograd.Function):
    """The identity, whose gradient is right and whose second derivative is not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.detach() + 0 * gradient
