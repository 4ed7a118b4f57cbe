"""Texts as tokens: by the tokenizer of a model's folder, cut to what the model reads, padded batch by batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from likewise.padding import IGNORED, PaddingCollate

Task = Literal["causal-lm", "sequence-classification"]
TASKS: tuple[Task, ...] = ("causal-lm", "sequence-classification")
TOGETHER = 1024  # texts that are tokenized at once


@dataclass(frozen=True)
class Tokenization:
    """How texts become inputs of a language model.

    Attributes:
        tokenizer: Of transformers.
        task: What the model does.
        max_length: Tokens that are kept of a text.
        pad_id: The token that shorter texts of a batch are filled up with.

    """

    tokenizer: Any
    task: Task
    max_length: int
    pad_id: int

    def tokenize(self, columns: Sequence[Sequence[str]]) -> "Texts":
        """Return the tokens of texts, or of pairs of texts.

        Of a pair, a classifier reads both with what its tokenizer puts between them; of a causal model the first is a
        prompt, and only the second counts.

        Args:
            columns: One or two columns of text.

        """
        if len(columns) not in (1, 2):
            raise ValueError(f"One column of texts or two are read, found {len(columns)}.")
        prompted = len(columns) == 2 and self.task == "causal-lm"
        rows, truncated = list[dict[str, np.ndarray]](), 0
        for start in range(0, len(columns[0]), TOGETHER):
            part = [list(column[start : start + TOGETHER]) for column in columns]
            for tokens, is_cut in self._prompted(*part) if prompted else self._plain(part):
                rows.append({name: np.asarray(values, np.int32) for name, values in tokens.items()})
                truncated += is_cut
        return Texts(rows, self, truncated)

    def _plain(self, columns: list[list[str]]) -> Iterator[tuple[dict[str, list[int]], bool]]:
        whole = self.tokenizer(*columns, truncation=False, verbose=False)
        lengths = [len(tokens) for tokens in whole["input_ids"]]
        cut = self.tokenizer(*columns, truncation=True, max_length=self.max_length)
        for i, length in enumerate(lengths):
            yield {name: cut[name][i] for name in cut}, length > self.max_length

    def _prompted(
        self, prompts: list[str], completions: list[str]
    ) -> Iterator[tuple[dict[str, list[int]], bool]]:
        before = self.tokenizer(prompts, verbose=False)["input_ids"]
        after = self.tokenizer(completions, add_special_tokens=False, verbose=False)["input_ids"]
        for prompt, completion in zip(before, after, strict=True):
            kept = completion[: self.max_length]
            first = prompt[len(prompt) - min(len(prompt), self.max_length - len(kept)) :]
            tokens = {
                "input_ids": [*first, *kept],
                "attention_mask": [1] * (len(first) + len(kept)),
                "labels": [IGNORED] * len(first) + kept,
            }
            yield tokens, len(first) + len(kept) < len(prompt) + len(completion)


class Texts(Dataset[dict[str, Tensor]]):
    """Tokens of texts, of several lengths; batches are padded to the longest text in them.

    Attributes:
        truncated: How many texts were cut.

    """

    def __init__(self, rows: list[dict[str, np.ndarray]], tokenization: Tokenization, truncated: int) -> None:
        self._rows, self._tokenization, self.truncated = rows, tokenization, truncated

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: torch.from_numpy(values).long() for name, values in self._rows[i].items()}

    def collate_batch(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch, padded on the right."""
        return PaddingCollate(self._tokenization.pad_id)(items)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the texts."""
        if not self.truncated:
            return ()
        length = self._tokenization.max_length
        return (
            f"{self.truncated:,} of {len(self):,} texts are longer than {length:,} tokens, and only these are read: "
            "--max-length sets another limit.",
        )
