"""Cross-validation: judge labels by networks that have not seen them.

    folds      every class is distributed at random over the k folds
    fold i     train(the other folds) -> a model; its probabilities for the samples of fold i are kept
    folder     fold-0.safetensors, ...: written when a fold is done, read when the same call is repeated

Use it if one network has memorized its labels or separates classes badly. It costs k trainings.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Subset

from likewise import files
from likewise.checks import check_function, check_integer, check_seed, describe
from likewise.data import Batches, column, training_data
from likewise.distributed import world_size
from likewise.fingerprint import Fingerprint, checksums
from likewise.gram.matrix import dataset_outputs
from likewise.identity import fingerprint_code
from likewise.model import Network
from likewise.progress import announce
from likewise.readouts import all_outputs, are_chances
from likewise.statistics.neighbors import contradiction
from likewise.statistics.targets import MOST_CLASSES, class_chances
from likewise.torch_state import preserve_generators
from likewise.wording import counted

Train = Callable[[Dataset[Any]], nn.Module]
SCHEMA = 1
METADATA = "likewise.crossval"


@dataclass(frozen=True)
class CrossValidated:
    """Predictions of networks for samples that they were not trained on.

    Attributes:
        probabilities: (n, classes) by the network that has not seen the sample.
        labels: (n,) class numbers.
        folds: (n,) the fold of each sample.

    Example:
        >>> import torch, likewise as lw
        >>> x = torch.randn(60, 4)
        >>> found = lw.crossval(lambda data: torch.nn.Linear(4, 3), (x, x[:, :3].argmax(1)), folds=3)
        >>> found.probabilities.shape, int(found.folds.max())
        (torch.Size([60, 3]), 2)

    """

    probabilities: Tensor
    labels: Tensor
    folds: Tensor

    @property
    def accuracy(self) -> float:
        """Share of labels predicted by the network that has not seen them."""
        return float((self.probabilities.argmax(1) == self.labels).double().mean())

    @property
    def suspicion(self) -> Tensor:
        """How much the probabilities contradict each label, (n,) in [0, 1]: see `label_suspicion`."""
        mine = self.probabilities.gather(1, self.labels[:, None])[:, 0]
        others = self.probabilities.scatter(1, self.labels[:, None], 0)
        return contradiction(mine, others.max(1).values)

    @classmethod
    def load(cls, folder: str | Path) -> "CrossValidated":
        """Load the result of `crossval(..., out=folder)`; all folds must be done."""
        first = Path(folder) / "fold-0.safetensors"
        known = _read(first, None)
        if known is None:
            raise FileNotFoundError(f"There is no {first}, so {folder} holds no cross-validation.")
        k = int(known.about["folds"])
        parts = [
            _read(Path(folder) / f"fold-{fold}.safetensors", known.about["identity"]) for fold in range(k)
        ]
        missing = [fold for fold, part in enumerate(parts) if part is None]
        if missing:
            raise ValueError(
                f"{len(missing)} of {k} folds are missing in {folder}: repeat the command that started it."
            )
        return _assemble([part for part in parts if part is not None])

    def __repr__(self) -> str:
        k = int(self.folds.max()) + 1
        return (
            f"CrossValidated({counted(len(self.labels), 'sample')} in {counted(k, 'fold')}, accuracy "
            f"{self.accuracy:.3f})"
        )


def crossval(
    train: Train,
    data: Any,
    *,
    labels: Any = None,
    folds: int = 5,
    seed: int = 0,
    out: str | Path | None = None,
) -> CrossValidated:
    """For each fold of a data set, train a network on the other folds, and predict that fold.

    Costs `folds` trainings on (folds − 1)/folds of the data. The random generators of Python, NumPy and torch are
    seeded before each training and restored afterwards. If the training function is deterministic, a resumed call gives
    the same numbers as one that was never stopped.

    Args:
        train: Called with a torch Dataset of (input, label) pairs (or of the data set's own items, if they contain
            labels); returns a trained classifier, any torch.nn.Module. For early stopping, hold back part of what it
            gets.
        data: Anything that `likewise.batches` accepts; of a DataLoader, its data set is used.
        labels: (n,) class numbers; None uses the labels of the data. With one output, 0 and 1.
        folds: Number of folds.
        seed: Seed for the folds and for each training.
        out: A folder for finished folds, which are read when the same call is repeated.

    Returns:
        CrossValidated. `lw.label_suspicion(found)` judges labels by it; `lw.label_suspicion(gram, crossval=found)` by
        it and by the votes of a network.

    Raises:
        ValueError: Labels do not fit, or `out` belongs to another data set, training function, number of folds or seed.

    Example:
        >>> import torch, likewise as lw
        >>> x = torch.randn(60, 4)
        >>> def train(data):
        ...     loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        ...     model = torch.nn.Linear(4, 3)
        ...     optimizer = torch.optim.Adam(model.parameters(), 0.1)
        ...     for _ in range(20):
        ...         for inputs, labels in loader:
        ...             optimizer.zero_grad()
        ...             torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        ...             optimizer.step()
        ...     return model
        >>> found = lw.crossval(train, (x, x[:, :3].argmax(1)), folds=3)
        >>> found.accuracy > 0.7
        True

    """
    if world_size() > 1:
        raise RuntimeError(
            f"crossval trains in one process, but {world_size()} were started: call it without torchrun."
        )
    check_function("train", train, "(data set) -> a trained torch.nn.Module")
    folds, seed = check_integer("folds", folds, 2), check_seed("seed", seed)
    batched = training_data(data, labels=None if isinstance(data, Batches) else labels)
    given = _class_numbers(batched, labels)
    if folds > len(given):
        raise ValueError(f"{len(given)} samples are too few for {folds} folds: pass fewer folds.")
    run = _Run(train, data if labels is None else None, batched, given, _deal(given, folds, seed), seed)
    return run.result(None if out is None else Path(out), folds)


class _Rows(Dataset[Any]):
    """Single samples of batches, as (input, label)."""

    def __init__(self, data: Batches, labels: Tensor) -> None:
        self._data, self._labels = data, labels

    def __len__(self) -> int:
        return self._data.n

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        place = i % len(self)
        inputs = self._data.samples(range(place, place + 1)).inputs
        return tree_map(lambda value: value[0], inputs), self._labels[place]


class _Part(NamedTuple):
    """A finished fold."""

    probabilities: Tensor  # (held, classes)
    places: Tensor  # (held,)
    labels: Tensor  # (held,)
    about: dict[str, Any]


@dataclass(frozen=True)
class _Run:
    train: Train
    items: Any  # the data set, if its items may be passed on unchanged
    data: Batches
    labels: Tensor
    folds: Tensor
    seed: int

    def result(self, out: Path | None, k: int) -> CrossValidated:
        """Return the probabilities of all folds, read from files if they are done."""
        identity = {} if out is None else self._identity(k)
        if out is not None:
            files.make_folder(out)
        parts = list[_Part]()
        for fold in range(k):
            path = None if out is None else out / f"fold-{fold}.safetensors"
            done = None if path is None else _read(path, identity)
            if done is None:
                announce(f"training fold {fold + 1} of {k}")
                held = (self.folds == fold).nonzero()[:, 0]
                about = {"schema": SCHEMA, "folds": k, "identity": identity}
                done = _Part(self._fold(held), held, self.labels[held], about)
                if path is not None:
                    _write(path, done)
            parts.append(done)
        return _assemble(parts)

    def _fold(self, held: Tensor) -> Tensor:
        """Return the probabilities of samples by a network trained on all others, (held, classes)."""
        fold = int(self.folds[held[0]])
        kept = (self.folds != fold).nonzero()[:, 0].tolist()
        with preserve_generators():
            mixed = int(np.random.SeedSequence([self.seed, fold]).generate_state(1)[0])
            torch.manual_seed(mixed)
            random.seed(mixed)
            np.random.seed(mixed)
            with torch.inference_mode(False), torch.enable_grad():
                model = self.train(self._subset(kept))
        if not isinstance(model, nn.Module):
            raise TypeError(f"train must return a trained torch.nn.Module, found {describe(model)}.")
        net = Network(model, all_outputs)
        outputs = dataset_outputs(net, self.data.take(held.tolist()), masked=True).cpu()
        if are_chances(outputs):  # so may a few logits look: the other samples show whether they are
            others = dataset_outputs(net, self.data.take(kept), masked=True).cpu()
            outputs = torch.cat([outputs, others])
        chances = class_chances(outputs, self.labels)
        if chances is None:
            raise ValueError(
                f"Labels go up to {int(self.labels.max())}, but the model that train returned has {outputs.shape[1]} "
                "outputs: these are not its classes."
            )
        return chances[: len(held)].double()

    def _subset(self, places: list[int]) -> Dataset[Any]:
        """Return samples to train on: items of the user's data set, or (input, label) pairs."""
        items = self.items.dataset if isinstance(self.items, DataLoader) else self.items
        holds_items = hasattr(items, "__getitem__") and not isinstance(
            items, Tensor | np.ndarray | Mapping | tuple | Batches
        )
        if holds_items and not hasattr(items, "to_numpy"):
            return Subset(items, places)
        return _Rows(self.data.take(places), self.labels[places])

    def _identity(self, k: int) -> dict[str, str]:
        """Return the fingerprints that a folder must share with this call."""
        once, again = Fingerprint(), Fingerprint()
        self.data.add_to(once, "samples")
        self.data.add_to(again, "samples")
        inputs = str(once.entries) if once.entries == again.entries else "random"
        return {
            "data": _digest(f"{checksums([self.labels])[0]} {inputs}"),
            "training function": fingerprint_code(self.train),
            "folds or seed": _digest(f"{k} {self.seed}"),
        }


def _deal(labels: Tensor, folds: int, seed: int) -> Tensor:
    """Assign each sample to a fold at random, with equal shares of every class, (n,)."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]
    found = torch.empty_like(labels)
    found[order] = torch.arange(len(labels)) % folds
    return found


def _class_numbers(data: Batches, labels: Any) -> Tensor:
    found = data.labels() if labels is None else column("labels", labels)
    if found is None:
        raise ValueError("Labels are needed: pass them, or give the data as (X, y).")
    found = found[:, 0] if found.dim() == 2 and found.shape[1] == 1 else found
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or int(found.min()) < 0:
        ends = "" if found.is_complex() else f" from {found.min().item():g} to {found.max().item():g}"
        raise TypeError(
            f"labels must be class numbers from 0, one per sample, found {describe(found)}{ends}. Numbers that are "
            "classes: labels.long(); one-hot: labels.argmax(1)."
        )
    if len(found) != data.n or int(found.max()) >= MOST_CLASSES:
        raise ValueError(
            f"{len(found)} labels from 0 to {int(found.max())} for {data.n} samples: expected one for each, below "
            f"{MOST_CLASSES}."
        )
    return found.cpu().long()


def _assemble(parts: list[_Part]) -> CrossValidated:
    n = sum(len(part.places) for part in parts)
    found = torch.zeros(n, max(part.probabilities.shape[1] for part in parts), dtype=torch.float64)
    labels, folds = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    for fold, part in enumerate(parts):
        found[part.places, : part.probabilities.shape[1]] = part.probabilities
        labels[part.places], folds[part.places] = part.labels, fold
    return CrossValidated(found, labels, folds)


def _write(path: Path, part: _Part) -> None:
    from safetensors.torch import save

    tensors = {"probabilities": part.probabilities, "places": part.places, "labels": part.labels}
    content = save(
        {name: value.contiguous() for name, value in tensors.items()}, {METADATA: json.dumps(part.about)}
    )
    files.write_atomically(path, lambda file: file.write(content), len(content))


def _read(path: Path, identity: dict[str, str] | None) -> _Part | None:
    """Read a finished fold; None if there is none. Without an identity, it may belong to any cross-validation."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            found = [file.get_tensor(name) for name in ("probabilities", "places", "labels")]
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"Cannot read {path} as a fold of likewise.crossval ({error}): delete it."
        ) from error
    if about.get("schema") != SCHEMA:
        raise ValueError(f"{path} was not written by likewise.crossval of this version: name another folder.")
    wanted = about["identity"] if identity is None else identity
    differing = [name for name, value in wanted.items() if about["identity"].get(name) != value]
    if differing:
        raise ValueError(
            f"{path.parent} belongs to another cross-validation: {' and '.join(differing)} differ. Delete it, or name "
            "another folder."
        )
    return _Part(found[0], found[1], found[2], about)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
