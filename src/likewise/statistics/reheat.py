"""Reheating: a memorized network that is trained further at a high learning rate forgets wrong labels first.

A network that reproduces every label does not show which ones are wrong. So a copy is trained for a few more epochs, at
a rate high enough to lose what only a single sample supports. Labels that other samples support are relearned from
them; wrong ones are not. Margins are recorded on the way (watch.py). The rate is right if training accuracy afterwards
is about what the neighbors' votes support: slightly lower rates forget nothing, slightly higher ones destroy the
network.
"""

import copy
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from likewise import files
from likewise.checks import (
    check_function,
    check_integer,
    check_number,
    check_seed,
    describe,
)
from likewise.data import Batches, column, training_data
from likewise.distributed import world_size
from likewise.fingerprint import Fingerprint, checksums, describe_module
from likewise.gram import GramMatrix, SketchOption
from likewise.gram.matrix import dataset_outputs
from likewise.identity import fingerprint_code
from likewise.model import Network, call_arguments, to_network
from likewise.readouts import all_outputs, are_chances
from likewise.statistics.neighbors import class_votes
from likewise.torch_state import exclusive, preserve_generators
from likewise.watch import Watch

MEMORIZED = 0.95  # training accuracy from which a network counts as memorized
NEARLY_ALL = (
    0.99  # the same where neighbors support as much: wrong labels may be the few that are not reproduced
)
NO_JUDGE, UNJUDGED = (
    0.03,
    0.85,
)  # neighbors support all but so much of what is learned: a target that does without them
LEAST_KEPT = (
    0.2  # of the way from naming the largest class to 1: below, a network is destroyed rather than heated
)
LOWEST_RATE, HIGHEST_RATE = 1e-5, 10.0  # of the range test
COARSE, FINE = 8, 24  # steps per factor of ten in the range test, before and after accuracy has begun to fall
NOTICED = 0.05  # share of the fall to the target from which steps are fine
AVERAGED, AVERAGED_SAMPLES = (
    4,
    128,
)  # steps whose accuracy is averaged in the range test, and samples in them, at least
TOLERANCE = 0.07  # of the accuracy after a round: where it is further from the target, the rate is corrected
CORRECTIONS = 5  # rounds at most that are thrown away for a rate that was too low or too high
SLOPE, SMALLEST_STEP, LARGEST_STEP = (
    2.0,
    0.1,
    0.5,
)  # of corrections: of the logarithm of the rate, by the error
STEPS_PER_EPOCH = 32  # at least, where the batch size is not given
LARGEST_BATCH = 256
SCHEMA = 1
METADATA = "likewise.reheat"

Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[..., Optimizer]


@dataclass(frozen=True)
class Round:
    """A copy of a network after hot epochs that started from the memorized weights."""

    model: nn.Module  # in evaluation mode
    watch: Watch  # record of the hot epochs
    learning_rate: float  # in the first half; it falls to 0 over the second
    accuracies: tuple[
        float, ...
    ]  # share of the labels predicted in each epoch, in training mode, before the update
    accuracy_after: float  # share of the labels that the copy reproduces, in evaluation mode


@dataclass(frozen=True)
class Reheated:
    """Copies of a network trained further at a high learning rate, and what became of them.

    Attributes:
        rounds: One copy each; empty if reheating was skipped.
        labels: (n,) class numbers that they were trained with.
        skipped: Why reheating was skipped; empty otherwise.
        target: Training accuracy that the rate was chosen for; NaN if the rate was given.
        accuracy_before: Share of the labels that the network reproduces.
        epochs: Epochs trained in all, including the range test and discarded rounds.
        seconds: Wall clock time, including the neighbors' votes for the target.

    Example:
        >>> import torch, likewise as lw
        >>> x = torch.randn(64, 4)
        >>> reheated = lw.reheat(torch.nn.Linear(4, 3), (x, x[:, :3].argmax(1)))      # not memorized
        >>> len(reheated.rounds), reheated.accuracy_before < 0.95
        (0, True)

    """

    rounds: tuple[Round, ...]
    labels: Tensor
    skipped: str
    target: float
    accuracy_before: float
    epochs: float
    seconds: float

    @property
    def model(self) -> nn.Module | None:
        """The copy of the first round; None if reheating was skipped."""
        return self.rounds[0].model if self.rounds else None

    @property
    def learning_rate(self) -> float:
        """The rate of the first round; NaN if reheating was skipped."""
        return self.rounds[0].learning_rate if self.rounds else math.nan

    @property
    def accuracy_after(self) -> float:
        """Share of the labels that the copies reproduce, mean over rounds; NaN if reheating was skipped."""
        after = [one.accuracy_after for one in self.rounds]
        return sum(after) / len(after) if after else math.nan

    @property
    def watch(self) -> Watch:
        """The record of all hot epochs; empty if reheating was skipped."""
        every = Watch(len(self.labels))
        for one in self.rounds:
            every.merge(one.watch)
        return every

    @property
    def margins(self) -> Tensor:
        """Mean margin over the hot epochs, (n,); low means suspicious. NaN if reheating was skipped."""
        return self.watch.margins

    def __repr__(self) -> str:
        if self.skipped:
            return f"Reheated(skipped: {self.skipped})"
        after = f"training accuracy {self.accuracy_before:.3f} before, {self.accuracy_after:.3f} after"
        rate = f"learning rate {self.learning_rate:.1e}"
        return f"Reheated({rate}; {after}; {self.epochs:.1f} epochs, {self.seconds:.0f} s)"


def reheat(
    model: nn.Module | Network,
    data: Any,
    *,
    labels: Any = None,
    epochs: int = 2,
    rounds: int = 1,
    learning_rate: float | None = None,
    target: float | None = None,
    memorized_above: float = MEMORIZED,
    loss: Loss | None = None,
    optimizer: MakeOptimizer = torch.optim.Adam,
    augment: Callable[[Any], Any] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    sketch: SketchOption = "auto",
    votes: Tensor | None = None,
    checkpoint: str | Path | None = None,
) -> Reheated:
    """Train copies of a memorized network for a few epochs at a high learning rate, and record their margins.

    The model, its mode, its gradients and all random generators are restored afterwards. Every parameter that requires
    grad is trained, in training mode. A round starts from the memorized weights, holds the rate for the first half of
    its epochs and decays it to 0 over the second. Reheating is skipped, and `skipped` says why, if the network
    reproduces fewer than `memorized_above` of the labels, or fewer than 99 % and neighbors support all of them: such a
    network still separates wrong labels from right ones, and reheating would do harm.

    The rate is chosen so that training accuracy afterwards is within 0.07 of `target`. A range test raises it step by
    step from 1e-5 until the accuracy of the last few training batches falls to the target. Rounds that then miss the
    target are discarded, five at most, and the rate is corrected. The same seed gives the same numbers, up to the
    nondeterminism of a GPU.

    Args:
        model: A trained classifier, any torch.nn.Module, or a Network (its autocast is used, its readout is not).
        data: The data set that it was trained on: anything that `likewise.batches` accepts. It may shuffle or augment
            at random: a DataLoader's data set, collate function and batch size are used, but not its order.
        labels: (n,) class numbers; None uses the labels of the data. With one output, 0 and 1.
        epochs: Epochs per round.
        rounds: Number of copies to train, each in another order; four rank labels better than one.
        learning_rate: The high rate; None searches it.
        target: Training accuracy to fall to. None: what neighbors' votes support, which visits all pairs, or .85 if
            they support everything learned.
        memorized_above: Training accuracy below which reheating is skipped; 0 reheats any network.
        loss: (outputs, labels) -> one number; None for the cross entropy.
        optimizer: Called with parameters and `lr=`; a class or a functools.partial of one.
        augment: Called with the inputs of each training batch, on the model's device; returns inputs.
        batch_size: None uses the loader's; without a loader, 16 to 256, so that an epoch has about 32 steps.
        seed: Seed for the order of samples, dropout and augmentation.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).
        votes: (n, classes) the result of `likewise.statistics.neighbors.class_votes` for the network, if you have it.
        checkpoint: A file, written after the range test and after each round. Training resumes from an existing one; a
            finished one is only read.

    Returns:
        Reheated; `lw.label_suspicion(gram, reheat=reheated)` ranks labels by it.

    Raises:
        TypeError: Labels are not class numbers, or the model cannot be copied.
        ValueError: Labels do not fit the outputs, or the checkpoint belongs to another model, data set or setting.

    Example:
        >>> import torch, likewise as lw
        >>> x = torch.randn(64, 4)
        >>> lw.reheat(torch.nn.Linear(4, 3), (x, x[:, :3].argmax(1))).skipped[-27:]
        'and 95 % count as memorized'

    """
    if world_size() > 1:
        raise RuntimeError(
            f"reheat trains in one process, but {world_size()} were started: call it without torchrun."
        )
    settings = _Settings(
        epochs=check_integer("epochs", epochs, 1),
        rounds=check_integer("rounds", rounds, 1),
        learning_rate=None
        if learning_rate is None
        else check_number("learning_rate", learning_rate, above=0),
        target=None if target is None else check_number("target", target, least=0, most=1),
        memorized_above=check_number("memorized_above", memorized_above, least=0, most=1),
        batch_size=None if batch_size is None else check_integer("batch_size", batch_size, 1),
        seed=check_seed("seed", seed),
        sketch=sketch,
    )
    if not callable(optimizer):
        raise TypeError(
            f"optimizer must be callable with parameters and lr=, found {describe(optimizer)}: pass a class of "
            "torch.optim, or a functools.partial of one."
        )
    functions = _Functions(
        None if loss is None else check_function("loss", loss, "(outputs, labels) -> a number"),
        optimizer,
        None if augment is None else check_function("augment", augment, "(inputs) -> inputs"),
    )
    with _training_state():
        net = to_network(model)
        batched = isinstance(data, Batches)  # perhaps built without these labels
        samples = _Samples(
            training_data(data, labels=None if batched else labels), net, labels if batched else None
        )
        return _Run(net, samples, settings, functions, votes).result(
            None if checkpoint is None else Path(checkpoint)
        )


@dataclass(frozen=True)
class _Settings:
    """Options that are numbers: a checkpoint belongs to one set of them."""

    epochs: int
    rounds: int
    learning_rate: float | None
    target: float | None
    memorized_above: float
    batch_size: int | None
    seed: int
    sketch: SketchOption


@dataclass(frozen=True)
class _Functions:
    loss: Loss | None  # None for the cross entropy
    optimizer: MakeOptimizer
    augment: Callable[[Any], Any] | None


@dataclass(frozen=True)
class _Progress:
    """The progress of a run: what a checkpoint holds besides tensors."""

    accuracy_before: float
    rate: float = math.nan  # of the next round
    target: float = math.nan
    too_low: float = 0.0  # the largest rate known to be too low
    too_high: float = math.inf  # the smallest rate known to be too high
    tried: int = 0  # rounds so far
    epochs: float = 0.0
    seconds: float = 0.0
    skipped: str = ""

    def misses(self, after: float) -> float:
        """Return how far an accuracy is from the target; 0 without a target."""
        return 0.0 if math.isnan(self.target) else abs(after - self.target)

    def corrected(self, after: float) -> "_Progress":
        """Return the progress with the rate for the next round."""
        if self.misses(after) <= TOLERANCE:
            return self
        low, high = self.too_low, self.too_high
        low, high = (max(low, self.rate), high) if after > self.target else (low, min(high, self.rate))
        step = min(LARGEST_STEP, max(SMALLEST_STEP, SLOPE * self.misses(after)))
        step = (
            2 * LARGEST_STEP if after > 1 - NOTICED * (1 - self.target) else step
        )  # nothing is forgotten yet
        rate = self.rate * math.exp(step if after > self.target else -step)
        rate = rate if low < rate < high else math.sqrt(low * high)
        return replace(self, rate=rate, too_low=low, too_high=high)


class _Samples:
    """The samples to train on, by their places 0 to n - 1."""

    def __init__(self, data: Batches, net: Network, labels: Any) -> None:
        self.data, self.net, self.n = data, net, data.n
        found = data.labels() if labels is None else column("labels", labels)
        if found is None:
            raise ValueError("Labels are needed: pass them, or give the data as (X, y).")
        self.labels = _class_numbers(found)
        if len(self.labels) != self.n:
            raise ValueError(f"{len(self.labels)} labels for {self.n} samples: expected one for each.")

    def read(self, places: list[int]) -> tuple[Any, Tensor]:
        """Return the inputs, on the model's device, and the labels of some samples."""
        batch = self.data.take(places).samples(range(len(places)))
        return self.net.to_device(batch.inputs), self.labels[places]

    def batch_size(self, given: int | None) -> int:
        """Return the number of samples of a step."""
        if given is None and not self.data.given:
            given = min(LARGEST_BATCH, max(16, self.n // STEPS_PER_EPOCH))
        return min(self.n, given or self.data.size)

    def steps(self, size: int, seed: int) -> Iterator[list[int]]:
        """Yield the places of one epoch's batches, whose sizes differ by one at most: none is a lone sample."""
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(seed))
        for places in order.tensor_split(self.step_count(size)):
            yield places.tolist()

    def step_count(self, size: int) -> int:
        """Return the number of steps of an epoch."""
        return max(1, round(self.n / size))

    def checksum(self) -> str:
        """Return a checksum of the labels, and of the inputs if they are the same each time they are read."""
        once, again = Fingerprint(), Fingerprint()
        self.data.add_to(once, "samples")
        self.data.add_to(again, "samples")
        inputs = str(once.entries) if once.entries == again.entries else "random"
        return f"{checksums([self.labels])[0]} {inputs}"


class _Run:
    """One call of `reheat`: trains copies of the model, which stays unchanged."""

    def __init__(
        self,
        net: Network,
        samples: _Samples,
        settings: _Settings,
        functions: _Functions,
        votes: Tensor | None,
    ) -> None:
        self.net, self.samples, self.settings, self.functions = net, samples, settings, functions
        self.votes = votes
        self.size = samples.batch_size(settings.batch_size)
        self.before = self._dataset_outputs(net.model)
        self.probabilities = are_chances(self.before)
        self.begun = time.monotonic()

    def result(self, path: Path | None) -> Reheated:
        """Reheat the network, resuming from a checkpoint if there is one."""
        checkpoint = None if path is None else _Checkpoint(path, self._identity())
        saved = None if checkpoint is None else checkpoint.read(self._copy, self.samples.n)
        progress, rounds = saved or (self._prepare(), [])
        self.begun -= progress.seconds
        if checkpoint is not None and saved is None and not progress.skipped:
            checkpoint.write(replace(progress, seconds=self._seconds()), [])
        while not self._finished(progress, rounds):
            one = self._round(progress)
            progress = replace(
                progress, tried=progress.tried + 1, epochs=progress.epochs + self.settings.epochs
            )
            if one is None:
                reason = f"training at a learning rate of {progress.rate:.1e} ended in NaN: pass a lower one"
                progress = replace(progress, skipped=reason)
                break
            rounds = self._select_rounds(rounds, one, progress)
            progress = progress.corrected(one.accuracy_after)
            if checkpoint is not None:
                checkpoint.write(replace(progress, seconds=self._seconds()), rounds)
        return Reheated(
            rounds=() if progress.skipped else tuple(rounds),
            labels=self.samples.labels,
            skipped=progress.skipped,
            target=progress.target,
            accuracy_before=progress.accuracy_before,
            epochs=progress.epochs,
            seconds=self._seconds(),
        )

    def _finished(self, progress: _Progress, rounds: list[Round]) -> bool:
        good = sum(progress.misses(one.accuracy_after) <= TOLERANCE for one in rounds)
        wanted = self.settings.rounds
        return bool(progress.skipped) or good >= wanted or progress.tried >= wanted + CORRECTIONS

    def _select_rounds(self, rounds: list[Round], one: Round, progress: _Progress) -> list[Round]:
        """Return the rounds that are close enough to the target; if there are none, the closest one."""
        every = sorted([*rounds, one], key=lambda done: progress.misses(done.accuracy_after))
        good = [done for done in [*rounds, one] if progress.misses(done.accuracy_after) <= TOLERANCE]
        return good or every[:1]

    def _prepare(self) -> _Progress:
        """Return the accuracy before, and the learning rate or the reason to skip reheating."""
        progress = _Progress(_share_right(self._logits(self.before), self.samples.labels))
        if progress.accuracy_before < self.settings.memorized_above:
            share, least = (100 * v for v in (progress.accuracy_before, self.settings.memorized_above))
            reason = (
                f"the network reproduces {share:.0f} % of the labels, and {least:.0f} % count as memorized"
            )
            return replace(progress, skipped=reason)
        if self.settings.learning_rate is not None:
            return replace(progress, rate=self.settings.learning_rate)
        target = self._target(progress.accuracy_before)
        if target is None:
            share = 100 * progress.accuracy_before
            reason = f"the network reproduces {share:.0f} % of the labels, and neighbors support no fewer"
            return replace(progress, skipped=f"{reason}: nothing suggests that any of them are wrong")
        rate, steps = self._range_test(target)
        progress = replace(progress, target=target, epochs=steps / self.samples.step_count(self.size))
        if rate is None:
            reason = f"training accuracy stays above {target:.2f} up to a learning rate of {HIGHEST_RATE}"
            return replace(progress, skipped=f"{reason}: pass another optimizer")
        return replace(progress, rate=rate)

    def _target(self, learned: float) -> float | None:
        """Return the training accuracy to fall to: the share that neighbors support, if they do not support everything.

        None if they support what was learned, and that is not everything: the network may be right about the rest.
        """
        if self.settings.target is not None:
            return self.settings.target
        labels = self.samples.labels
        votes = self.votes
        if votes is None:
            net = Network(self.net.model, all_outputs, autocast=self.net.autocast)
            gram = GramMatrix(net, self.samples.data)
            votes = class_votes(gram, labels, sketch=self.settings.sketch)
        supported = float((votes.cpu().argmax(1) == labels).double().mean())
        usual = float(torch.bincount(labels).max()) / len(labels)  # by always naming the largest class
        unjudged = learned - supported < NO_JUDGE
        if unjudged and learned < NEARLY_ALL and self.settings.memorized_above > 0:
            return None
        target = UNJUDGED if unjudged else supported
        return max(target, usual + LEAST_KEPT * (1 - usual))

    def _range_test(self, target: float) -> tuple[float | None, int]:
        """Return the learning rate at which training accuracy falls to the target, and the number of steps taken.

        Accuracy is relative to that of the first steps, because batch statistics and dropout alone cost some of it.
        """
        model = self._copy()
        optimizer = self._optimizer(model, LOWEST_RATE)
        accuracies, rates, rate = list[float](), list[float](), LOWEST_RATE
        window = max(AVERAGED, -(-AVERAGED_SAMPLES // self.size))
        for places in self._endless_steps():
            outputs = self._step(model, optimizer, places, rate)
            accuracies.append(_share_right(outputs, self.samples.labels[places]))
            rates.append(rate)
            kept = sum(accuracies[-window:]) / max(sum(accuracies[:window]), 1e-9)
            if kept <= target and len(rates) > window:
                return math.sqrt(rate * rates[-window]), len(rates)
            rate *= 10 ** (1 / (COARSE if kept > 1 - NOTICED * (1 - target) else FINE))
            if rate > HIGHEST_RATE:
                break
        return None, len(rates)

    def _endless_steps(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            seed = _mix_seed(self.settings.seed, 0, epoch)
            _seed_generators(seed)
            yield from self.samples.steps(self.size, seed)
            epoch += 1

    def _round(self, progress: _Progress) -> Round | None:
        """Train a copy for one round; return None if its weights became NaN or infinite."""
        model, watch = self._copy(), Watch(self.samples.n)
        optimizer = self._optimizer(model, progress.rate)
        epochs = range(self.settings.epochs)
        accuracies = tuple(self._train_epoch(model, optimizer, watch, e, progress) for e in epochs)
        if not all(bool(value.isfinite().all()) for value in model.parameters()):
            return None
        for value in model.parameters():
            value.grad = None
        after = _share_right(self._logits(self._dataset_outputs(model.eval())), self.samples.labels)
        return Round(model, watch, progress.rate, accuracies, after)

    def _train_epoch(
        self, model: nn.Module, optimizer: Optimizer, watch: Watch, epoch: int, progress: _Progress
    ) -> float:
        """Train for one epoch, and return its accuracy."""
        seed = _mix_seed(self.settings.seed, 1 + progress.tried, epoch)
        _seed_generators(seed)
        steps = list(self.samples.steps(self.size, seed))
        right = 0.0
        for i, places in enumerate(steps):
            done = (epoch + i / len(steps)) / self.settings.epochs
            outputs = self._step(model, optimizer, places, progress.rate * min(1.0, 2 * (1 - done)))
            labels = self.samples.labels[places]
            watch.update(outputs, labels, torch.tensor(places))
            right += _share_right(outputs, labels) * len(places)
        return right / self.samples.n

    def _step(self, model: nn.Module, optimizer: Optimizer, places: list[int], rate: float) -> Tensor:
        """Take one step, and return the outputs before it."""
        inputs, labels = self.samples.read(places)
        if self.functions.augment is not None:
            inputs = self.functions.augment(inputs)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        outputs = self._outputs(model, inputs)
        loss = self._loss(outputs, labels.to(outputs.device))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"loss must return one number, found {describe(loss)}: take its mean.")
        loss.backward()
        optimizer.step()
        return self._logits(outputs.detach())

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.functions.loss is not None:
            return self.functions.loss(outputs, labels)
        logits = self._logits(outputs)
        if logits.shape[1] > 1:
            return F.cross_entropy(logits, labels)
        return F.binary_cross_entropy_with_logits(logits[:, 0], labels.to(logits))

    def _outputs(self, model: nn.Module, inputs: Any) -> Tensor:
        low, device = self.net.autocast, next(model.parameters()).device.type
        with torch.autocast(device, dtype=low, enabled=low is not None):
            positional, named = call_arguments(inputs)
            outputs = all_outputs(model(*positional, **named))
        return outputs.float() if low is not None else outputs

    def _dataset_outputs(self, model: nn.Module) -> Tensor:
        """Return the outputs of all samples in evaluation mode."""
        net = Network(model, all_outputs, autocast=self.net.autocast)
        _seed_generators(self.settings.seed)
        outputs = dataset_outputs(net, self.samples.data, masked=True).cpu()
        _refuse_other_outputs(outputs, self.samples.labels)
        return outputs

    def _logits(self, outputs: Tensor) -> Tensor:
        """Return outputs as logits, also if the model ends in a softmax or sigmoid."""
        if not self.probabilities:
            return outputs
        limits = torch.finfo(outputs.dtype)
        if outputs.shape[1] > 1:
            return outputs.clamp(min=limits.tiny).log()
        return outputs.logit(eps=limits.eps)

    def _copy(self) -> nn.Module:
        """Return a copy of the model in training mode, without gradients."""
        try:
            model = copy.deepcopy(self.net.model)
        except Exception as error:  # whatever a module's own __deepcopy__ raises
            raise TypeError(
                f"copy.deepcopy cannot copy {type(self.net.model).__name__} ({error}), and reheating trains a copy. "
                "Load the weights into a fresh model, and pass that."
            ) from error
        for value in model.parameters():
            value.grad = None
        return model.train()

    def _optimizer(self, model: nn.Module, rate: float) -> Optimizer:
        trained = [value for value in model.parameters() if value.requires_grad]
        if not trained:
            raise ValueError("No parameter of the model requires grad, so there is nothing to train.")
        return self.functions.optimizer(trained, lr=rate)

    def _seconds(self) -> float:
        return time.monotonic() - self.begun

    def _identity(self) -> dict[str, str]:
        """Return what a checkpoint must share with this call, in words."""
        model = self.net.model
        state = [*dict(model.named_parameters()).values(), *dict(model.named_buffers()).values()]
        used = self.functions
        # what an augmentation counts, say, is not what makes it another one
        functions = fingerprint_code(used.loss, used.optimizer, used.augment, stores=False)
        return {
            "model": f"{describe_module(model)} {checksums(state)}",
            "data": self.samples.checksum(),
            "settings": f"{asdict(self.settings)} {self.net.autocast}",
            "loss, optimizer or augment": functions,
        }


@dataclass(frozen=True)
class _Checkpoint:
    """A safetensors file with the rounds that are done."""

    path: Path
    identity: dict[str, str]

    def write(self, progress: _Progress, rounds: list[Round]) -> None:
        """Write the state atomically."""
        from safetensors.torch import save

        tensors = dict[str, Tensor]()
        for i, one in enumerate(rounds):
            named = {"watch": one.watch.part(slice(0, one.watch.n)), **_named_state(one.model)}
            plain = {name: value.detach().cpu().contiguous().clone() for name, value in named.items()}
            tensors |= {f"{i}.{name}": value for name, value in plain.items()}
        facts = [(one.learning_rate, one.accuracies, one.accuracy_after) for one in rounds]
        about = {"schema": SCHEMA, "progress": asdict(progress), "rounds": facts, "identity": self._digests()}
        content = save(tensors, {METADATA: json.dumps(about)})
        files.make_folder(self.path.absolute().parent)
        files.write_atomically(self.path, lambda file: file.write(content), len(content))

    def read(self, make_model: Callable[[], nn.Module], n: int) -> tuple[_Progress, list[Round]] | None:
        """Read the state; None if there is none yet."""
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                about = json.loads((file.metadata() or {}).get(METADATA, "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(
                f"{self.path} cannot be read as a checkpoint of likewise.reheat ({error}): delete it, or name another "
                "file."
            ) from error
        if about.get("schema") != SCHEMA:
            raise ValueError(
                f"{self.path} was not written by likewise.reheat of this version: name another file."
            )
        differing = [
            name for name, digest in self._digests().items() if about["identity"].get(name) != digest
        ]
        if differing:
            raise ValueError(
                f"{self.path} is a checkpoint of another call: {' and '.join(differing)} differ. Delete it, or name "
                "another file."
            )
        rounds = list[Round]()
        for i, (rate, accuracies, after) in enumerate(about["rounds"]):
            model, watch = make_model().eval(), Watch(n)
            watch.merge_part(slice(0, n), tensors[f"{i}.watch"])
            with torch.no_grad():
                for name, value in _named_state(model).items():
                    value.copy_(tensors[f"{i}.{name}"])
            rounds.append(Round(model, watch, rate, tuple(accuracies), after))
        return _Progress(**about["progress"]), rounds

    def _digests(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(text.encode("utf-8")).hexdigest() for name, text in self.identity.items()
        }


@contextmanager
def _training_state() -> Iterator[None]:
    """Gradients on, random generators and everything global restored on leaving; one thread at a time."""
    with exclusive, ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(preserve_generators())
        yield


def _class_numbers(labels: Tensor) -> Tensor:
    found = labels[:, 0] if labels.dim() == 2 and labels.shape[1] == 1 else labels
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or int(found.min()) < 0:
        raise TypeError(
            f"labels must be class numbers from 0, one per sample, found {describe(labels)}"
            f"{_range_of(labels)}: reheating is for classifiers. If floats are classes, pass labels.long(); if "
            "one-hot, labels.argmax(1)."
        )
    return found.cpu().long()


def _range_of(labels: Tensor) -> str:
    """Return the smallest and the largest label, in words."""
    return "" if labels.is_complex() else f" from {labels.min().item():g} to {labels.max().item():g}"


def _refuse_other_outputs(outputs: Tensor, labels: Tensor) -> None:
    classes = max(2, outputs.shape[1])
    if int(labels.max()) >= classes:
        raise ValueError(
            f"Labels go up to {int(labels.max())}, but the model has {outputs.shape[1]} outputs, for {classes} "
            "classes: these are not its classes."
        )


def _share_right(outputs: Tensor, labels: Tensor) -> float:
    """Return the share of predictions that are the labels; one output is the logit of class 1 of two."""
    guess = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
    right = (guess == labels.to(guess.device)) & outputs.isfinite().all(1)
    return float(right.double().mean())


def _mix_seed(seed: int, use: int, epoch: int) -> int:
    """Return a different seed for each use and epoch."""
    return int(np.random.SeedSequence([seed, use, epoch]).generate_state(1)[0])


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _named_state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
