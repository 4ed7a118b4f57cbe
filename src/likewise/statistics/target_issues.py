"""Suspicious targets other than one class per sample: several labels, values, masks, tokens.

The votes are the same as for classes: every other sample votes with max(centered similarity, 0)^4 for its own target.

    several labels   b(x, c) = mean of the votes' share for label c and the network's probability of it;
                     suspicion |y − b|: 0 if all support the given 0 or 1, 1 if all contradict it
    values           residual from the votes' mean, and from the network if it has not memorized its targets,
                     in robust standard deviations
    masks, tokens    each cell of a mask, or each token, is a sample: see `cell_suspicion`
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from likewise.checks import check_integer, check_number, describe
from likewise.data import Batches, batches
from likewise.gram import GramMatrix, SketchOption, Strip, SumReducer, pair_source
from likewise.linalg import product_by_chunks
from likewise.model import Network, call_arguments, to_network
from likewise.readouts import all_outputs, are_chances
from likewise.statistics.neighbors import EXPONENT
from likewise.statistics.targets import given_labels, model_outputs, refuse_unbounded, to_device

FLAG_Z = 3.5  # robust standard deviations beyond which a value is flagged: two in ten thousand by chance
MEMORIZED = 0.1  # of the votes' residual: a network whose own residuals are smaller has memorized its targets
ROUNDING = 1e-12  # of the largest value: residuals that differ by less are equal
NEARLY_EQUAL = 1e-4  # of the standard deviation: a median deviation below this is rounding of float32 outputs
TEMPERATURE = 0.1  # of the mean over cells that is one number per sample: near the largest


class MultilabelSuspicion(NamedTuple):
    """How far the network and the neighbors contradict labels, if a sample may have several.

    Attributes:
        suspicion: (n, classes) in [0, 1] for each given 0 or 1.
        samples: (n,) the largest of each sample.
        suggested: (n, classes) bool, the labels that they support.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(100, 4)
        >>> y = (x[:, :3] > 0).long()
        >>> y[7, 1] = 1 - y[7, 1]                                             # a wrong label
        >>> net = torch.nn.Linear(4, 3, bias=False)
        >>> _ = net.weight.data.copy_(4 * torch.eye(3, 4))                               # trained
        >>> found = lw.multilabel_suspicion(lw.GramMatrix(net, (x, y)))
        >>> divmod(int(found.suspicion.argmax()), 3)
        (7, 1)

    """

    suspicion: Tensor
    samples: Tensor
    suggested: Tensor


class ValueSuspicion(NamedTuple):
    """How far the network and the neighbors contradict targets that are numbers.

    Attributes:
        suspicion: (n,) in [0, 1]: the share of residuals of right targets that are smaller, if these are normal.
        expected: (n, q) the target expected from the neighbors' targets.
        score: (n,) residual in robust standard deviations, the largest of the q numbers; 0 if all residuals are equal.
        flagged: (n,) beyond 3.5 of them.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 3)
        >>> y = x @ torch.tensor([1.0, 2.0, 0.5])
        >>> y[9] += 5                                                         # a wrong value
        >>> net = torch.nn.Linear(3, 1)
        >>> _ = net.weight.data.copy_(torch.tensor([[1.0, 2.0, 0.5]]))                    # trained
        >>> int(lw.value_suspicion(lw.GramMatrix(net, (x, y))).score.argmax())
        9

    """

    suspicion: Tensor
    expected: Tensor
    score: Tensor
    flagged: Tensor


class CellSuspicion(NamedTuple):
    """Where the labels of masks or of sequences look wrong.

    Attributes:
        cells: (n, h, w) or (n, t) suspicion of each cell or token; NaN without a label.
        samples: (n,) one number per sample, near its largest cell.
        suggested: Shaped like `cells`: the class that contradicts the label; −1 without a label.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(12, 1, 8, 8)
        >>> net = torch.nn.Conv2d(1, 2, 3, padding=1)
        >>> lw.cell_suspicion(net, (x, (x[:, 0] > 0).long()), cell=4).cells.shape
        torch.Size([12, 2, 2])

    """

    cells: Tensor
    samples: Tensor
    suggested: Tensor


@dataclass(frozen=True)
class WeightedSumReducer(SumReducer):
    """Σ max(centered similarity, 0)^exponent · values over the other samples, and the sum of the weights."""

    values: Tensor  # (m, q)
    exponent: float = EXPONENT
    results: ClassVar[int] = 2
    centered: ClassVar[bool] = True

    def terms(self, block: Strip) -> tuple[Tensor, ...]:
        """Return the sums, (b, q), and the weights' sums, (b,), in float64."""
        weights = block.without_self(block.positive_power(self.exponent, centered=True), 0)
        return product_by_chunks(weights, self.values[block.column_places]), weights.sum(1)


def multilabel_suspicion(
    gram: GramMatrix, labels: Any = None, *, exponent: float = EXPONENT, sketch: SketchOption = "auto"
) -> MultilabelSuspicion:
    """How much the network and the neighbors' votes contradict each 0 or 1 of a matrix of labels; visits all pairs.

    Args:
        gram: A square matrix; similarities are centered.
        labels: (n, classes) of 0 and 1; None uses the labels of the data.
        exponent: How local votes are.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

    Returns:
        MultilabelSuspicion; rank by `suspicion`, (n, classes).

    Example:
        >>> import torch, likewise as lw
        >>> x = torch.randn(60, 4)
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 3), (x, (x[:, :3] > 0).long()))
        >>> lw.multilabel_suspicion(gram).suspicion.shape
        torch.Size([60, 3])

    """
    given = _label_matrix(gram, labels)
    sums, total = _weighted_sums(gram, given.double(), exponent, sketch)
    outputs = model_outputs(gram).double().cpu() if gram.of_network else None
    known = None if outputs is None or outputs.shape != given.shape else outputs
    return to_device(multilabel_from_votes(sums, total, given, known), gram.device)


def multilabel_from_votes(
    sums: Tensor, total: Tensor, given: Tensor, outputs: Tensor | None
) -> MultilabelSuspicion:
    """Judge 0s and 1s by votes (n, classes), their sums (n,) and logits or probabilities."""
    labels = given.double()
    usual = labels.mean(0).expand_as(labels)
    opinion = torch.where(total[:, None] > 0, sums / total.clamp(min=1e-300)[:, None], usual)
    if outputs is not None:
        in_range = bool(((outputs >= 0) & (outputs <= 1)).all())
        opinion = (opinion + (outputs if in_range else outputs.sigmoid())) / 2
    suspicion = (labels - opinion).abs().clamp(0, 1)
    return MultilabelSuspicion(suspicion, suspicion.amax(1), opinion > 0.5)


def value_suspicion(
    gram: GramMatrix, labels: Any = None, *, exponent: float = EXPONENT, sketch: SketchOption = "auto"
) -> ValueSuspicion:
    """How far each target is from the network's prediction and its neighbors' targets; visits all pairs.

    Args:
        gram: A square matrix; similarities are centered.
        labels: (n,) or (n, q) numbers; None uses the labels of the data.
        exponent: How local votes are.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

    Returns:
        ValueSuspicion; rank by `score`.

    Example:
        >>> import torch, likewise as lw
        >>> x = torch.randn(60, 4)
        >>> gram = lw.GramMatrix(torch.nn.Linear(4, 1), (x, x.sum(1)))
        >>> lw.value_suspicion(gram).expected.shape
        torch.Size([60, 1])

    """
    refuse_unbounded(gram)
    found = given_labels(gram, labels)
    if found is None or not gram.square:
        raise ValueError(
            "Values of one data set are needed: pass labels, or the data as (X, y), and no columns to the GramMatrix."
        )
    values = found.reshape(len(found), -1).double().cpu()
    sums, total = _weighted_sums(gram, values, exponent, sketch)
    outputs = model_outputs(gram).double().cpu() if gram.of_network else None
    known = None if outputs is None or outputs.shape != values.shape else outputs
    return to_device(values_from_votes(sums, total, values, known), gram.device)


def values_from_votes(sums: Tensor, total: Tensor, values: Tensor, outputs: Tensor | None) -> ValueSuspicion:
    """Judge values (n, q) by sums (n, q) and weights (n,) of votes, and by the network's outputs.

    Means over neighbors are biased towards the mean of all, so residuals are taken from a line fitted to them.
    """
    means = torch.where(total[:, None] > 0, sums / total.clamp(min=1e-300)[:, None], values.mean(0))
    expected = torch.stack([_rescale_to_values(m, v) for m, v in zip(means.T, values.T, strict=True)], 1)
    rounding = ROUNDING * values.abs().amax(0)
    residual = values - expected
    scale = _robust_scale(residual, rounding)
    scores = residual / scale
    if outputs is not None:
        own, varies = values - outputs, scale.isfinite()
        own_scale = _robust_scale(own, rounding)
        if bool(varies.any()) and bool((own_scale > MEMORIZED * scale)[varies].all()):
            scores = torch.where(varies, (scores + own / own_scale) / 2, 0)
            scores = scores / _robust_scale(scores, ROUNDING)
    score = scores.abs().amax(1)
    suspicion = torch.erf(score / math.sqrt(2))
    return ValueSuspicion(suspicion, expected, score, score > FLAG_Z)


def cell_suspicion(
    model: nn.Module | Network,
    data: Any,
    labels: Any = None,
    *,
    cell: int = 16,
    ignore: Sequence[int] = (-100, 255),
    parameters: Any = None,
    sketch: SketchOption = "auto",
) -> CellSuspicion:
    """Where the labels of masks, or of tokens in sequences, contradict the network and similar cells elsewhere.

    A cell of a mask is a square of `cell` pixels; a cell of a sequence is one token. Each cell is a sample; its outputs
    are the means of the network's outputs over the cell. Cells vote for their shares of classes. Suspicion is the mean
    of the total variation between a cell's shares and the votes, and of 1 − p(label) averaged over its pixels.
    Costs one gradient per cell: choose large cells, few `parameters` (the last layers), or a part of the data.

    Args:
        model: Returns (n, classes, h, w) for images, or (n, t, classes) for sequences.
        data: Inputs with labels (n, h, w) or (n, t), anything that `likewise.batches` accepts.
        labels: The labels, if they are not in the data.
        cell: Pixels per side; sequences have cells of one token.
        ignore: Labels that mean "no label".
        parameters: Parameters whose gradients are compared, as for Network.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

    Returns:
        CellSuspicion.

    Example:
        >>> import torch, likewise as lw
        >>> words = torch.randint(0, 30, (20, 6))
        >>> net = torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 3))
        >>> lw.cell_suspicion(net, (words, words % 3)).cells.shape
        torch.Size([20, 6])

    """
    net = to_network(model, all_outputs if not isinstance(model, Network) else None, parameters)
    cell = check_integer("cell", cell, 1)
    samples = batches(data, labels=labels)
    masks = samples.labels()
    if masks is None or masks.dim() not in (2, 3) or masks.is_floating_point():
        found = "none" if masks is None else describe(masks)
        raise ValueError(f"Masks (n, h, w) or token labels (n, t) of integers are needed, found {found}.")
    masks = masks.cpu().long()  # in uint8 or bool, labels to ignore would be other numbers
    size = 1 if masks.dim() == 2 else cell
    labeled, shares = _cell_shares(masks, size, ignore)
    places = labeled.flatten(1).nonzero()
    if not len(places):
        raise ValueError(f"No cell has a label: all labels are among those to ignore, {list(ignore)}.")
    given = shares.flatten(2).transpose(1, 2)[places[:, 0], places[:, 1]]  # (cells, classes)
    inner = _CellModel(net.model, size, masks.dim() == 3)
    wrapped = Network(inner, all_outputs, parameters=_inner(net), autocast=net.autocast)
    gram = GramMatrix(wrapped, batches(_Cells(samples, places), labels=False))
    sums, total = _weighted_sums(gram, given, EXPONENT, sketch)
    opinion = torch.where(total[:, None] > 0, sums / total.clamp(min=1e-300)[:, None], given)
    by_votes = (given - opinion).abs().sum(1) / 2
    unlikely, chances = _unlikely(net, samples, masks, size, ignore)
    mine = unlikely.flatten(1)[places[:, 0], places[:, 1]]
    said = chances.flatten(2).transpose(1, 2)[places[:, 0], places[:, 1]]
    return _collect(labeled, places, (by_votes + mine) / 2, _best_class(opinion, said))


def _collect(labeled: Tensor, places: Tensor, suspicion: Tensor, suggested: Tensor) -> CellSuspicion:
    cells = torch.full(labeled.shape, torch.nan, dtype=torch.float64).flatten(1)
    classes = torch.full(labeled.shape, -1, dtype=torch.int64).flatten(1)
    cells[places[:, 0], places[:, 1]] = suspicion
    classes[places[:, 0], places[:, 1]] = suggested
    weights = torch.softmax(cells.nan_to_num(-torch.inf) / TEMPERATURE, 1).nan_to_num(0)
    mean = (weights * cells.nan_to_num(0)).sum(1)
    return CellSuspicion(cells.reshape(labeled.shape), mean, classes.reshape(labeled.shape))


def _best_class(opinion: Tensor, said: Tensor) -> Tensor:
    width = max(opinion.shape[1], said.shape[1])
    return sum(F.pad(part, (0, width - part.shape[1])) for part in (opinion, said)).argmax(1)  # type: ignore[union-attr]


def _unlikely(
    net: Network, data: Batches, masks: Tensor, cell: int, ignore: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the mean over each cell of 1 − p(label), (n, h, w) or (n, t), and its mean probabilities by class."""
    missing, chances, start = list[Tensor](), list[Tensor](), 0
    ends_in_softmax: bool | None = None  # judged by the first batch
    device, low = next(net.model.parameters()).device.type, net.autocast
    autocast = torch.autocast(device, dtype=low, enabled=low is not None)
    with net.evaluation_mode(), torch.no_grad():
        for batch in data:
            inputs = net.to_device(batch.inputs)
            with autocast:
                outputs = all_logits(_call(net.model, inputs))
            outputs = (outputs if outputs.dim() == 4 else outputs.transpose(1, 2)).double()
            if ends_in_softmax is None:
                ends_in_softmax = are_chances(outputs.movedim(1, -1).flatten(0, -2))
            probabilities = (outputs if ends_in_softmax else outputs.softmax(1)).cpu()
            here = masks[start : start + len(batch)]
            start += len(batch)
            ignored = _ignored_mask(here, ignore)
            largest = int(torch.where(ignored, 0, here).max())
            if here.shape[1:] != probabilities.shape[2:] or largest >= probabilities.shape[1]:
                raise ValueError(
                    f"Labels have shape {tuple(here.shape[1:])} and go up to {largest}, but outputs have shape "
                    f"{tuple(probabilities.shape[1:])}: expected one class for each pixel or token."
                )
            mine = probabilities.gather(1, torch.where(ignored, 0, here)[:, None])[:, 0]
            missing.append(
                _cell_means(torch.where(ignored, 0.0, 1 - mine), cell)
                / _cell_means((~ignored).double(), cell).clamp(min=1e-12)
            )
            chances.append(_cell_means(probabilities, cell))
    return torch.cat(missing), torch.cat(chances)


def _cell_means(values: Tensor, cell: int) -> Tensor:
    """Return the mean of each cell of (n, h, w) or (n, c, h, w); tokens, which are cells, unchanged."""
    if cell == 1:
        return values
    planes = values[:, None] if values.dim() == 3 else values
    found = F.avg_pool2d(planes, cell, ceil_mode=True, count_include_pad=False)
    return found[:, 0] if values.dim() == 3 else found


class _CellModel(nn.Module):
    """The outputs of one cell of each sample, (n, classes)."""

    def __init__(self, model: nn.Module, cell: int, image: bool) -> None:
        super().__init__()
        self.model, self.cell, self.image = model, cell, image

    def forward(self, inputs: Any, places: Tensor) -> Tensor:
        outputs = all_logits(_call(self.model, inputs))
        if self.image:
            pooled = F.avg_pool2d(outputs, self.cell, ceil_mode=True, count_include_pad=False)
            outputs = pooled.flatten(2).transpose(1, 2)
        return outputs.gather(1, places.reshape(-1, 1, 1).expand(-1, 1, outputs.shape[2]))[:, 0]


def all_logits(outputs: Any) -> Tensor:
    """Return the logits that a model returned, as a tensor or under `.logits`."""
    found = getattr(outputs, "logits", outputs)
    if not isinstance(found, Tensor) or found.dim() not in (3, 4):
        raise TypeError(
            f"Expected outputs (n, classes, h, w) or (n, t, classes), found {describe(found)}: wrap the model in one "
            "that returns them."
        )
    return found


class _Cells(Dataset[Any]):
    """One sample for each cell: the inputs of its image, and which cell it is."""

    def __init__(self, data: Batches, places: Tensor) -> None:
        self._data, self._places = data, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        image, cell = self._places[i].tolist()
        inputs = self._data.samples(range(image, image + 1)).inputs
        return tree_map(lambda value: value[0], inputs), torch.tensor(cell)


def _call(model: nn.Module, inputs: Any) -> Any:
    positional, named = call_arguments(inputs)
    return model(*positional, **named)


def _inner(net: Network) -> list[str]:
    return [f"model.{name}" for name in net.names]


def _ignored_mask(masks: Tensor, ignore: Sequence[int]) -> Tensor:
    return torch.isin(masks, torch.tensor(list(ignore), dtype=masks.dtype)) | (masks < 0)


def _cell_shares(masks: Tensor, cell: int, ignore: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return which cells have a label, and the share of each class among labeled pixels, (n, classes, ...) float64."""
    ignored = _ignored_mask(masks, ignore)
    classes = int(masks[~ignored].max()) + 1 if (~ignored).any() else 1
    members = torch.stack([((masks == c) & ~ignored).double() for c in range(classes)], 1)
    counts = _cell_means(members, cell)
    total = counts.sum(1)
    return total > 0, counts / total.clamp(min=1e-12)[:, None]


def _weighted_sums(
    gram: GramMatrix, values: Tensor, exponent: float, sketch: SketchOption
) -> tuple[Tensor, Tensor]:
    refuse_unbounded(gram)
    exponent = check_number("exponent", exponent, above=0)
    if not gram.square:
        raise ValueError("Samples vote within one data set: build the GramMatrix without columns.")
    ((sums, total),) = pair_source(gram, sketch).visit(WeightedSumReducer(values, exponent))
    return sums.cpu(), total.cpu()


def is_label_matrix(labels: Tensor | None) -> bool:
    """Whether labels are several 0s and 1s per sample, not one-hot classes."""
    if labels is None or labels.dim() != 2 or labels.shape[1] < 2:
        return False
    binary = bool(((labels == 0) | (labels == 1)).all())
    return binary and not bool((labels.sum(1) == 1).all())


def _label_matrix(gram: GramMatrix, labels: Any) -> Tensor:
    found = given_labels(gram, labels)
    if found is None or found.dim() != 2 or not bool(((found == 0) | (found == 1)).all()):
        raise ValueError(
            f"Expected a matrix of 0 and 1, (n, classes), found {'none' if found is None else describe(found)}. For "
            "one class per sample, use likewise.label_suspicion; for values, likewise.value_suspicion."
        )
    return found.cpu()


def _rescale_to_values(means: Tensor, values: Tensor) -> Tensor:
    """Rescale means over neighbors to the values, by the line through medians of thirds."""
    order = means.argsort()
    low, high = order[: max(1, len(order) // 3)], order[-max(1, len(order) // 3) :]
    run = means[high].median() - means[low].median()
    slope = (values[high].median() - values[low].median()) / run if run > 0 else torch.ones(()).to(values)
    return values.median() + slope * (means - means.median())


def _robust_scale(residual: Tensor, rounding: Tensor | float) -> Tensor:
    """Return a robust standard deviation of each column, by the median absolute deviation; inf if all are equal.

    If more than half of a column are equal, as for counts that are mostly 0, it is the standard deviation around them.
    """
    distance = (residual - residual.median(0).values).abs()
    spread = distance.square().mean(0).sqrt()
    robust = 1.4826 * distance.median(0).values
    scale = torch.where(robust > NEARLY_EQUAL * spread, robust, spread)
    return torch.where(spread > rounding, scale, torch.inf)
