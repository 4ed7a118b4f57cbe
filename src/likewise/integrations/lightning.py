"""The record of a training run in Lightning.

    trainer = lightning.Trainer(callbacks=[WatchCallback("run.parquet")])
    trainer.fit(module, DataLoader(likewise.WithIndex(dataset), ...))

where `training_step` returns {"loss": loss, "logits": logits}.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from likewise.checks import describe
from likewise.integrations.recorder import PassRecorder, check_watch, find_indexed
from likewise.watch import INDEX, Watch

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as missing:
    try:
        from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]
    except ImportError:
        raise ImportError("This callback needs Lightning: pip install lightning") from missing


class WatchCallback(Callback):
    """Records margins, losses and forgetting of each training sample.

    Wrap the training data in `WithIndex`; the callback removes the positions from each batch before `training_step`
    sees it. `training_step` must return a dict with the logits besides the loss. After each epoch, the record is saved,
    and its `scalars()` go to the trainer's logger. In distributed training, records are merged after each epoch.

    Args:
        path: The file to which the first process saves the record; None saves nothing.
        watch: A record to continue, such as `Watch.load(path)`; None starts a new one.
        logits: Key of the logits in the dict that `training_step` returns.
        labels: Key or position of the labels in a batch; by default "labels" or "label", else position 1.

    Attributes:
        watch: The record; None before training starts.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        watch: Watch | None = None,
        logits: str = "logits",
        labels: str | int | None = None,
    ) -> None:
        super().__init__()
        self.path, self.watch = path, watch
        self.logits, self.labels = logits, labels
        self._recorder: PassRecorder | None = None
        self._ids: Tensor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start or continue the record."""
        data = find_indexed(getattr(trainer.train_dataloader, "dataset", None))
        if data is None:
            raise TypeError(
                "Training samples carry no positions: pass one DataLoader(likewise.WithIndex(dataset)) to the trainer, "
                f"found {describe(trainer.train_dataloader)}. With several loaders, call watch.update in training_step."
            )
        self.watch = check_watch(self.watch, len(data))
        self._recorder = PassRecorder(self.watch, self.path, trainer.world_size)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Remove the positions from the batch."""
        self._ids = _take_index(batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the batch to the record."""
        if outputs is None:  # training_step returned None: the batch was skipped
            return
        if not isinstance(outputs, Mapping) or self.logits not in outputs:
            raise ValueError(
                f'training_step must return {{"loss": loss, "{self.logits}": logits}} for the record of training, '
                f"found {sorted(outputs) if isinstance(outputs, Mapping) else describe(outputs)}."
            )
        self._current().update(outputs[self.logits], self._labels_in(batch), self._ids)
        self._ids = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Merge the records of all processes, log and save."""
        recorder = self._join(pl_module)
        pl_module.log_dict(recorder.watch.scalars(), sync_dist=recorder.ranks > 1)
        if trainer.is_global_zero:
            recorder.save()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what was recorded since the last epoch, if training stopped within one."""
        recorder = self._join(pl_module)
        if trainer.is_global_zero:
            recorder.save()

    def _join(self, pl_module: Any) -> PassRecorder:
        recorder = self._current()
        recorder.join(pl_module.all_gather, pl_module.device)
        return recorder

    def _current(self) -> PassRecorder:
        if self._recorder is None:
            raise RuntimeError("The callback records training: use it with trainer.fit.")
        return self._recorder

    def _labels_in(self, batch: Any) -> Any:
        if self.labels is not None:
            return batch[self.labels]
        if not isinstance(batch, Mapping):
            return batch[1]
        found = [name for name in ("labels", "label") if name in batch]
        if not found:
            raise ValueError(
                f"A batch has no labels under 'labels' or 'label', found {sorted(batch)}: pass labels=KEY."
            )
        return batch[found[0]]


def _take_index(batch: Any) -> Tensor:
    """Remove the positions from a batch and return them."""
    found: Any = None
    if isinstance(batch, MutableMapping) and INDEX in batch:
        found = batch.pop(INDEX)
    elif isinstance(batch, list) and len(batch) > 1:
        found = batch.pop()
    if not isinstance(found, Tensor) or found.is_floating_point() or found.dtype == torch.bool:
        raise TypeError(
            f"A batch must be a dict with {INDEX!r}, or a list with positions at its end, found {describe(batch)}: the "
            "collate function dropped or changed the positions that WithIndex adds. Keep them, or call watch.update in "
            "training_step."
        )
    return found
