"""Cross-validation: what networks that have not seen a sample say of its label.

    folds      every class is dealt out at random over the k folds
    fold i     train(the other folds) -> a model; its probabilities of the samples of fold i are kept
    folder     fold-0.safetensors, ...: written when a fold is done, read when the same call is made again

Where one network has memorized its labels, or tells classes apart badly, this is the way to know, for k more trainings.
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
from likewise.model_state import preserve_generators
from likewise.progress import announce
from likewise.readouts import all_outputs
from likewise.statistics.targets import MOST_CLASSES, class_chances
from likewise.votes import contradiction
from likewise.wording import counted

Train = Callable[[Dataset[Any]], nn.Module]
SCHEMA = 1
METADATA = "likewise.crossval"


@dataclass(frozen=True)
class CrossValidated:
    """What networks say of samples that they were not trained on.

    Attributes:
        probabilities: (n, classes) of each class, by the network that has not seen the sample.
        labels: (n,) class numbers.
        folds: (n,) in which fold a sample was left out.

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
        """Share of the labels that are predicted by a network that has not seen them."""
        return float((self.probabilities.argmax(1) == self.labels).double().mean())

    @property
    def suspicion(self) -> Tensor:
        """How much the probabilities contradict each label, (n,) in [0, 1]: see `label_suspicion`."""
        mine = self.probabilities.gather(1, self.labels[:, None])[:, 0]
        others = self.probabilities.scatter(1, self.labels[:, None], 0)
        return contradiction(mine, others.max(1).values)

    @classmethod
    def load(cls, folder: str | Path) -> "CrossValidated":
        """Return what `crossval(..., out=folder)` found; all folds must be done."""
        first = Path(folder) / "fold-0.safetensors"
        known = _read(first, None)
        if known is None:
            raise FileNotFoundError(f"There is no {first}: {folder} holds no cross-validation.")
        k = int(known.about["folds"])
        parts = [
            _read(Path(folder) / f"fold-{fold}.safetensors", known.about["identity"]) for fold in range(k)
        ]
        missing = [fold for fold, part in enumerate(parts) if part is None]
        if missing:
            raise ValueError(
                f"{len(missing)} of {k} folds are missing in {folder}: the command that began it goes on."
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
    """Train a network for each fold of a data set on the other folds, and ask it about that fold.

    Costs `folds` trainings on (folds − 1)/folds of the data. Before each, the random generators of Python, NumPy and
    torch are seeded, afterwards they are as before; a call that goes on from a folder gives the same numbers as one
    that was never stopped, if the training function is deterministic.

    Args:
        train: Called with a torch Dataset of (input, label) pairs (items as they are, where the data set has items
            with labels); returns a trained classifier, any torch.nn.Module. Hold back what it needs to stop early
            from what it is given.
        data: Anything that `likewise.batches` accepts; a DataLoader's data set is used.
        labels: (n,) class numbers; those that travel with the data if None. With one output, 0 and 1.
        folds: How many.
        seed: Of the folds and of each training.
        out: A folder; what is done is kept there, and read when the same call is made again.

    Returns:
        CrossValidated; `lw.label_suspicion(found)` judges labels by it, `lw.label_suspicion(gram, crossval=found)` by
        it and by the votes of a network.

    Raises:
        ValueError: Labels do not fit, or `out` is of another data set, training function, number of folds or seed.

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
            f"crossval trains in one process, and this one is of {world_size()}: call it without torchrun."
        )
    check_function("train", train, "(data set) -> a trained torch.nn.Module")
    folds, seed = check_integer("folds", folds, 2), check_seed("seed", seed)
    batched = training_data(data, labels=None if isinstance(data, Batches) else labels)
    given = _class_numbers(batched, labels)
    if folds > len(given):
        raise ValueError(f"{folds} folds of {len(given)} samples: there are too few for that.")
    run = _Run(train, data if labels is None else None, batched, given, _deal(given, folds, seed), seed)
    return run.result(None if out is None else Path(out), folds)


class _Rows(Dataset[Any]):
    """Samples of batches, one by one, as (input, label)."""

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
    """A fold that is done."""

    probabilities: Tensor  # (held, classes)
    places: Tensor  # (held,)
    labels: Tensor  # (held,)
    about: dict[str, Any]


@dataclass(frozen=True)
class _Run:
    train: Train
    items: Any  # the data set, where its items may be passed on as they are
    data: Batches
    labels: Tensor
    folds: Tensor
    seed: int

    def result(self, out: Path | None, k: int) -> CrossValidated:
        """Return the probabilities of all folds, from files where these are done."""
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
        """Return the probabilities of samples by a network that is trained on all others, (held, classes)."""
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
        chances = class_chances(outputs, self.labels)
        if chances is None:
            raise ValueError(
                f"Labels go up to {int(self.labels.max())}, and the model that train returned has {outputs.shape[1]} "
                "outputs: these are not the classes that it tells."
            )
        return chances.double()

    def _subset(self, places: list[int]) -> Dataset[Any]:
        """Return some samples to train on: items of the user's own data set, else pairs."""
        items = self.items.dataset if isinstance(self.items, DataLoader) else self.items
        holds_items = hasattr(items, "__getitem__") and not isinstance(
            items, Tensor | np.ndarray | Mapping | tuple | Batches
        )
        if holds_items and not hasattr(items, "to_numpy"):
            return Subset(items, places)
        return _Rows(self.data.take(places), self.labels[places])

    def _identity(self, k: int) -> dict[str, str]:
        """Return what a folder must have in common with this call."""
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
    """Return a fold for each sample, (n,): of every class equally many in each, at random."""
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
            f"labels must be class numbers from 0, one a sample, found {describe(found)}{ends}. Numbers that are "
            "classes: labels.long(); one-hot: labels.argmax(1)."
        )
    if len(found) != data.n or int(found.max()) >= MOST_CLASSES:
        raise ValueError(
            f"{len(found)} labels from 0 to {int(found.max())} for {data.n} samples: one for each is needed, below "
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
    """Return a fold that is done, of any cross-validation if no identity is given; None if it is not there."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
            found = [file.get_tensor(name) for name in ("probabilities", "places", "labels")]
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as a fold of likewise.crossval ({error}): remove it."
        ) from error
    if about.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} is no fold that this version's likewise.crossval wrote: name another folder."
        )
    wanted = about["identity"] if identity is None else identity
    differing = [name for name, value in wanted.items() if about["identity"].get(name) != value]
    if differing:
        raise ValueError(
            f"{path.parent} is of another cross-validation: {' and '.join(differing)} differ. Remove it, or name "
            "another folder."
        )
    return _Part(found[0], found[1], found[2], about)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
