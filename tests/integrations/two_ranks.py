"""Two processes train with a record: `python two_ranks.py lightning|transformers FOLDER`, under torchrun.

Each process notes (epoch, sample, correct) of every sample it sees, from which the test counts again.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import likewise as lw

N, EPOCHS = 32, 4
seen: list[tuple[int, int, bool]] = []


class Numbered(Dataset):
    """Samples whose second input is their number, so that the test knows who was where."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        torch.manual_seed(i)
        return {"x": torch.cat([torch.randn(6), torch.tensor([float(i)])]), "labels": int(i * 7 % 3)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.epoch = 0

    def forward(self, x, labels):
        logits = self.net(x[:, :6])
        seen.extend(
            (self.epoch, int(i), bool(c)) for i, c in zip(x[:, 6], logits.argmax(1) == labels, strict=True)
        )
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def lightning(folder):
    import lightning

    from likewise.integrations.lightning import WatchCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            self.net.epoch = self.current_epoch
            return self.net(**batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1.0)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=2, strategy="ddp", enable_model_summary=False,
        callbacks=[WatchCallback(folder / "watch.parquet")], **options,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(lw.WithIndex(Numbered()), 4, shuffle=True))


def transformers(folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from likewise.integrations.transformers import watch_trainer

    class Epochs(TrainerCallback):
        def on_epoch_begin(self, args, state, control, model, **_):
            getattr(model, "module", model).epoch = round(state.epoch)

    options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "optim": "sgd"}
    arguments = TrainingArguments(
        str(folder / "out"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=4,
        learning_rate=1.0,
        **options,
    )
    trainer = Trainer(Net(), arguments, train_dataset=Numbered(), callbacks=[Epochs()])
    watch_trainer(trainer, folder / "watch.parquet")
    trainer.train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    where = Path(sys.argv[2])
    {"lightning": lightning, "transformers": transformers}[sys.argv[1]](where)
    (where / f"seen{os.environ['RANK']}.json").write_text(json.dumps(seen))
