"""The record of a training run in the Trainer of Hugging Face.

trainer = transformers.Trainer(...)
watch = watch_trainer(trainer, "run.parquet")
trainer.train()
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from likewise.checks import check_type, describe
from likewise.integrations.recorder import PassRecorder, check_watch, find_indexed
from likewise.watch import INDEX, Watch, WithIndex

try:
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise ImportError("This callback needs transformers: pip install transformers accelerate") from missing


def watch_trainer(
    trainer: Trainer, path: str | Path | None = None, *, watch: Watch | None = None, logits: str = "logits"
) -> Watch:
    """Record margins, losses and forgetting of each training sample of a Trainer, and return the record.

    Call it once, before `trainer.train()`. It wraps the training data in `WithIndex` and the collator in one that
    passes positions on, keeps the Trainer from dropping them as an unused column, and removes them from each batch
    before the model or your own `compute_loss` sees it. The record is saved after each epoch and with each checkpoint;
    after each epoch, `trainer.log` logs its `scalars()`. In distributed training, records are merged each time.

    Args:
        trainer: A Trainer, or a subclass, for a model that classifies sequences, images or the like. Your own
            `compute_loss` must support `return_outputs=True`.
        path: The file to which the first process saves the record; None saves nothing.
        watch: A record to continue, such as `Watch.load(path)`; None starts a new one.
        logits: Key of the logits in the model's outputs.

    Returns:
        The record, which fills while the trainer trains. In distributed training, it is complete after each epoch.
    """
    check_type("trainer", trainer, Trainer, "a transformers.Trainer")
    if trainer.train_dataset is None:
        raise ValueError("The trainer has no train_dataset to record.")
    if isinstance(trainer.compute_loss, _WatchedLoss):
        raise ValueError("This trainer is recorded already.")
    if find_indexed(trainer.train_dataset) is None:
        trainer.train_dataset = WithIndex(trainer.train_dataset)
    data = find_indexed(trainer.train_dataset)
    assert data is not None
    recorder = PassRecorder(check_watch(watch, len(data)), path, trainer.accelerator.num_processes)
    trainer.data_collator = _IndexCollator(trainer.data_collator)
    _keep_index_column(trainer)
    setattr(trainer, "compute_loss", _WatchedLoss(trainer.compute_loss, recorder, logits))  # noqa: B010
    trainer.add_callback(WatchCallback(trainer, recorder))
    return recorder.watch


class WatchCallback(TrainerCallback):
    """Merges, logs and saves the record of a trainer; `watch_trainer` adds it."""

    def __init__(self, trainer: Trainer, recorder: PassRecorder) -> None:
        self.trainer, self.recorder = trainer, recorder

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Merge the records of all processes, log and save."""
        self._join_and_save()
        wanted = control.should_log  # of the trainer's own numbers; a call of log would cancel it
        self.trainer.log(self.recorder.watch.scalars())
        control.should_log = wanted

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save with each checkpoint."""
        self._join_and_save()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save what was recorded since the last epoch."""
        self._join_and_save()

    def _join_and_save(self) -> None:
        accelerator = self.trainer.accelerator
        self.recorder.join(accelerator.gather, accelerator.device)
        if self.trainer.is_world_process_zero():
            self.recorder.save()


class _IndexCollator:
    """Collates samples without their positions, then adds the positions to the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        import torch

        if not all(isinstance(sample, Mapping) and INDEX in sample for sample in samples):
            return self.collate(samples)  # of evaluation
        plain = [{name: value for name, value in sample.items() if name != INDEX} for sample in samples]
        batch = self.collate(plain)
        batch[INDEX] = torch.tensor([sample[INDEX] for sample in samples])
        return batch


class _WatchedLoss:
    """The trainer's `compute_loss`, which also records the batch."""

    def __init__(self, compute_loss: Callable[..., Any], recorder: PassRecorder, logits: str) -> None:
        self.compute_loss, self.recorder, self.logits = compute_loss, recorder, logits

    def __call__(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        ids = inputs.pop(INDEX, None)
        if not model.training:
            return self.compute_loss(model, inputs, return_outputs=return_outputs, **options)
        labels = inputs.get("labels")
        if ids is None or labels is None:
            raise ValueError(
                f"A training batch must hold 'labels' and {INDEX!r} to be recorded, found {sorted(inputs)}: samples of "
                "train_dataset must be dicts, and your own get_train_dataloader must use the trainer's train_dataset "
                "and data_collator."
            )
        found = self.compute_loss(model, inputs, return_outputs=True, **options)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(
                f"compute_loss must return (loss, outputs) for return_outputs=True, found {describe(found)}."
            )
        loss, outputs = found
        self.recorder.update(
            outputs[self.logits] if isinstance(outputs, Mapping) else outputs[1], labels, ids
        )
        return (loss, outputs) if return_outputs else loss


def _keep_index_column(trainer: Any) -> None:
    """Keep the trainer from dropping positions as a column that the model's forward does not take."""
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        trainer._signature_columns.append(INDEX)
