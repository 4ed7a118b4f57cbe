"""The same term in Lightning: one line in `training_step`.

pip install lightning
python examples/training_lightning.py
"""

import argparse
import logging
from functools import partial

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from training_loop import digits, make_net

import likewise as lw


class Classifier(lightning.LightningModule):
    """Cross entropy, and digits of one class asked to be seen alike."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.net = make_net()
        self.weight = weight
        self.term = partial(lw.losses.group_with_outputs, readout=lw.label_against_rest)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        term, logits = self.term(self.net, x, y, y)
        self.log("similarity within classes", 1 - term.detach(), prog_bar=True)
        return F.cross_entropy(logits, y) + self.weight * term

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), 5e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    x, y = digits()
    model = Classifier(weight=0.3)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", enable_model_summary=False, gradient_clip_val=1.0, **options
    )
    trainer.fit(model, DataLoader(TensorDataset(x[:1000], y[:1000]), batch_size=64, shuffle=True))
    accuracy = (model.net(x[1000:]).argmax(1) == y[1000:]).float().mean()
    inside = trainer.callback_metrics["similarity within classes"]
    print(f"accuracy {accuracy:.3f}, similarity within classes {inside:.3f}")


if __name__ == "__main__":
    main()
