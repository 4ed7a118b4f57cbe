"""The same term in the Hugging Face Trainer: override `compute_loss`.

A tiny BERT learns whether the larger number of a sequence comes first, with sequences of one class asked to
be seen alike in the last block and the head. Random weights, nothing is downloaded.

    pip install transformers accelerate
    python examples/training_transformers.py
"""

import argparse
import tempfile
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import likewise as lw


class Sequences(Dataset):
    """Two numbers from 5 to 29 and noise; the label tells which is larger."""

    def __init__(self, n: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(5, 30, (n, 2), generator=generator)
        self.labels = (self.tokens[:, 0] > self.tokens[:, 1]).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


class SimilarityTrainer(Trainer):
    """Adds the term to the model's own loss."""

    term = staticmethod(
        partial(
            lw.losses.group,
            weight=0.2,
            readout=lw.label_against_rest,
            parameters=["bert.encoder.layer.1.*", "classifier.*"],
        )
    )

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> Any:
        """Return the model's own loss and the term."""
        loss = super().compute_loss(model, dict(inputs), **options)
        if not model.training:
            return loss
        labels = inputs["labels"]
        given = {name: value for name, value in inputs.items() if name != "labels"}
        term = self.term(model, given, labels, labels)
        return (loss[0] + term, loss[1]) if isinstance(loss, tuple) else loss + term


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = BertForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=50,
        )
        trainer = SimilarityTrainer(model, arguments, train_dataset=Sequences(2000, 0))
        trainer.train()
    test = Sequences(200, 1)
    with torch.no_grad():
        accuracy = (model.eval()(test.tokens).logits.argmax(1) == test.labels).float().mean()
    net = lw.Network(model, lw.label_against_rest, parameters=SimilarityTrainer.term.keywords["parameters"])
    k = lw.class_similarity(lw.GramMatrix(net, {"input_ids": test.tokens, "labels": test.labels})).mean
    print(f"accuracy {accuracy:.3f}, similarity within classes {k.diagonal().mean():.3f}")


if __name__ == "__main__":
    main()
