"""The record of training by Lightning's trainer."""

import logging
import warnings

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import likewise as lw
from likewise.integrations.lightning import WatchCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.seen = []

    def training_step(self, batch, index):
        assert len(batch) == 2  # positions are gone
        x, y = batch if isinstance(batch, list) else (batch["x"], batch["labels"])
        logits = self.net(x)
        self.seen.append((logits.detach().clone(), y))
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


class Rows(torch.utils.data.Dataset):
    """Samples that are dicts."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[i]
        return {"x": x, "labels": y}


def dataset(n=60):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long())


def fit(data, callback=None, epochs=3, **options):
    torch.manual_seed(0)
    module = Classifier()
    options = {"logger": False, "max_epochs": epochs, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[] if callback is None else [callback],
            **options,
        )
        trainer.fit(module, data if isinstance(data, DataLoader) else DataLoader(data, 16, shuffle=True))
    return module, trainer


@pytest.mark.parametrize("kind", [lambda data: data, Rows], ids=["tuples", "dicts"])
def test_weights_are_bit_identical_and_the_record_is_saved_and_logged(tmp_path, kind):
    data, callback = kind(dataset()), WatchCallback(tmp_path / "watch.parquet")
    plain, _ = fit(data)
    watched, trainer = fit(lw.WithIndex(data), callback)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (callback.watch.updates == 3).all()
    assert torch.equal(callback.watch.labels, dataset().tensors[1])
    assert lw.Watch.load(tmp_path / "watch.parquet").table().equals(callback.watch.table())
    logged = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("watch/")}
    assert logged == pytest.approx(callback.watch.scalars(), rel=1e-5)
    mean = torch.cat([nn.functional.cross_entropy(z, y, reduction="none") for z, y in watched.seen]).mean()
    assert float(callback.watch.losses.mean()) == pytest.approx(float(mean), rel=1e-5)


def test_scalars_go_to_the_trainers_logger(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(lw.WithIndex(dataset()), WatchCallback(), logger=logger, log_every_n_steps=1)
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "watch/margin" in text.splitlines()[0]


def test_positions_in_a_subset_are_those_of_the_whole(tmp_path):
    callback = WatchCallback()
    fit(Subset(lw.WithIndex(dataset()), list(range(20, 60))), callback)
    assert callback.watch.n == 60 and callback.watch.unseen.tolist() == list(range(20))


def test_a_run_that_stops_within_an_epoch_is_saved(tmp_path):
    fit(lw.WithIndex(dataset()), WatchCallback(tmp_path / "watch.parquet"), epochs=-1, max_steps=2)
    assert int(lw.Watch.load(tmp_path / "watch.parquet").updates.sum()) == 32


def test_a_record_goes_on(tmp_path):
    fit(lw.WithIndex(dataset()), WatchCallback(tmp_path / "a.parquet"), epochs=1)
    callback = WatchCallback(watch=lw.Watch.load(tmp_path / "a.parquet"))
    fit(lw.WithIndex(dataset()), callback, epochs=2)
    assert (callback.watch.updates == 3).all()


class WithoutLogits(Classifier):
    def training_step(self, batch, index):
        return super().training_step(batch, index)["loss"]


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(TypeError, match="WithIndex"):
        fit(dataset(), WatchCallback())
    with pytest.raises(TypeError, match="collate function dropped"):
        fit(
            DataLoader(lw.WithIndex(dataset()), 16, collate_fn=lambda rows: tuple(zip(*rows, strict=True))),
            WatchCallback(),
        )
    with pytest.raises(ValueError, match="record is of 3 samples, and the data set has 60"):
        fit(lw.WithIndex(dataset()), WatchCallback(watch=lw.Watch(3)))
    monkeypatch.setitem(globals(), "Classifier", WithoutLogits)
    with pytest.raises(ValueError, match='"logits": logits'):
        fit(lw.WithIndex(dataset()), WatchCallback())
