"""Tokenize texts with the tokenizer in a model's folder, truncated to the model's length, padded per batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from likewise.marked_text import TokenText, token_spans
from likewise.padding import IGNORED, PaddingCollate
from likewise.wording import agreeing

Task = Literal["causal-lm", "sequence-classification"]
TASKS: tuple[Task, ...] = ("causal-lm", "sequence-classification")
TOGETHER = 1024  # texts that are tokenized at once
Row = dict[str, np.ndarray]  # what the model is called with for one text


@dataclass(frozen=True)
class Tokenization:
    """How texts become inputs of a language model.

    Attributes:
        tokenizer: Of transformers.
        task: What the model does.
        max_length: Tokens that are kept of a text.
        pad_id: The token that shorter texts of a batch are filled up with.
        on_demand: Tokenize a text when it is asked for, not all at once: for a few of many.

    """

    tokenizer: Any
    task: Task
    max_length: int
    pad_id: int
    on_demand: bool = False

    def tokenize(self, columns: Sequence[Sequence[str]]) -> "Texts":
        """Return the tokens of texts, or of pairs of texts.

        Of a pair, a classifier reads both with what its tokenizer puts between them; of a causal model the first is a
        prompt, and only the second counts.

        Args:
            columns: One or two columns of text.

        Raises:
            ValueError: A text has no tokens.

        """
        if len(columns) not in (1, 2):
            raise ValueError(f"Expected one or two columns of texts, found {len(columns)}.")
        if self.on_demand:
            return Texts(dict[int, Row](), self, columns, 0)
        rows, truncated = list[Row](), 0
        for start in range(0, len(columns[0]), TOGETHER):
            for tokens, is_cut in self._tokenize([column[start : start + TOGETHER] for column in columns]):
                _refuse_empty(tokens, len(rows), columns)
                rows.append(tokens)
                truncated += is_cut
        return Texts(dict(enumerate(rows)), self, columns, truncated)

    def tokenize_one(self, texts: Sequence[str]) -> Row:
        """Return the tokens of one text, or of one pair."""
        return next(self._tokenize([[text] for text in texts]))[0]

    def token_text(self, texts: Sequence[str], tokens: Sequence[int]) -> TokenText:
        """Return the text whose tokens count (the last of a pair), and the spans of its tokens.

        Args:
            texts: One text, or a pair.
            tokens: As `tokenize` returned them. Those of a prompt have empty spans.

        """
        text = texts[-1]
        if len(texts) == 1:
            found, spans = token_spans(self.tokenizer, text, truncation=True, max_length=self.max_length)
        elif self.task == "causal-lm":
            found, spans = token_spans(self.tokenizer, text, add_special_tokens=False, verbose=False)
            found = found[: self.max_length]
            before = len(tokens) - len(found)
            found = [*tokens[:before], *found]
            spans = None if spans is None else [(0, 0)] * before + spans[: len(found) - before]
        else:
            return TokenText(text, None)
        return TokenText(text, spans if found == list(tokens) else None)

    def _tokenize(self, columns: Sequence[Sequence[str]]) -> Iterator[tuple[Row, bool]]:
        prompted = len(columns) == 2 and self.task == "causal-lm"
        part = [list(column) for column in columns]
        for tokens, is_cut in self._prompted(*part) if prompted else self._plain(part):
            yield {name: np.asarray(values, np.int32) for name, values in tokens.items()}, is_cut

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


def _refuse_empty(tokens: Row, i: int, columns: Sequence[Sequence[str]]) -> None:
    """Raise if a text has no tokens: the model would read only padding."""
    if len(tokens["input_ids"]):
        return
    shown = " and ".join(repr(column[i][:40]) for column in columns)
    raise ValueError(
        f"Text {i} (from 0) is {shown}, and the tokenizer returns no tokens for it: fill it in, or leave the row out."
    )


class Texts(Dataset[dict[str, Tensor]]):
    """Tokens of texts, of several lengths; batches are padded to the longest text in them.

    Attributes:
        truncated: How many texts were cut, as far as they were tokenized.

    """

    def __init__(
        self,
        rows: dict[int, Row],
        tokenization: Tokenization,
        columns: Sequence[Sequence[str]],
        truncated: int,
    ) -> None:
        self._rows, self._tokenization, self._columns, self.truncated = rows, tokenization, columns, truncated

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: torch.from_numpy(values).long() for name, values in self._row(i).items()}

    def token_text(self, i: int) -> TokenText:
        """Return text i (the second of a pair), and the spans of its tokens."""
        return self._tokenization.token_text(self._texts(i), self._row(i)["input_ids"].tolist())

    def _row(self, i: int) -> Row:
        if not 0 <= i < len(self):
            raise IndexError(f"text {i} of {len(self)}")
        if i not in self._rows:
            tokens = self._tokenization.tokenize_one(self._texts(i))
            _refuse_empty(tokens, i, self._columns)
            self._rows[i] = tokens
        return self._rows[i]

    def _texts(self, i: int) -> list[str]:
        return [column[i] for column in self._columns]

    def collate_batch(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch, padded on the right."""
        return PaddingCollate(self._tokenization.pad_id)(items)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the texts."""
        if not self.truncated:
            return ()
        length = self._tokenization.max_length
        return (
            f"{self.truncated:,} of {len(self):,} texts {agreeing(self.truncated, 'is', 'are')} longer than "
            f"{length:,} tokens and truncated; --max-length sets another limit.",
        )
