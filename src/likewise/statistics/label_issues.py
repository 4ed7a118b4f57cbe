"""Which labels look wrong: those that the network and the samples it treats alike contradict."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from likewise.checks import check_flag, check_integer, check_number, check_type
from likewise.gram import GramMatrix, Reducer, SketchOption, Strip, choose_width, pair_source
from likewise.model import Network
from likewise.statistics.crossval import CrossValidated
from likewise.statistics.neighbors import EXPONENT, Neighbors, class_votes, contradiction, merge_largest
from likewise.statistics.noise_rate import Interval, estimate_noise
from likewise.statistics.reheat import MEMORIZED, Reheated
from likewise.statistics.reheat import reheat as reheat_network
from likewise.statistics.shared_words import class_resemblance
from likewise.statistics.targets import (
    accuracy_warning,
    class_chances,
    class_numbers,
    class_outputs,
    readout_looks_at_label,
    refuse_other,
    refuse_unbounded,
)
from likewise.watch import Watch
from likewise.wording import counted

DISAGREEMENT = 0.5  # between the two estimates of precision, beyond which none is given
SAME_ORDER = (
    0.3  # rank correlation of margins and suspicion within classes: .8 and more in the same order, else 0
)
ROUNDS = 4  # of reheating, by default
VOTES_WEIGHT, MARGIN_WEIGHT = 2.0, 1.0  # weights of ranks: votes and recorded margins; margins while hot
WORDS_WEIGHT = (
    4.0  # of the words that texts share, beside 1 for the rest; chosen on benchmarks/label_words.py
)
WORDS_EXPONENT = 3  # how fast that weight falls where words predict fewer labels than the network's votes do
MEMORIZED_EXPONENT = 4  # how fast votes lose weight as they contest fewer labels than other judges do


class LabelSuspicion(NamedTuple):
    """How far the network and the neighbors of each sample contradict its label.

    Attributes:
        suspicion: (n,) in [0, 1]: 0 if all support the label, 1 if all support one other class.
        suggested: (n,) the class that they support.
        support: (n,) how strongly they support it, in [0, 1]; by reheated copies, or by networks that have not seen the
            sample, if these judge.
        contested: (n,) the neighbors vote for another class, and there are enough of them.
        isolated: (n,) too few votes to judge by.
        chance_wrong: (n,) probability that the label is wrong, estimated from the votes; NaN unless `distinct`.
        flagged: (n,) contested and more likely wrong than right; with a higher bar if not `distinct`. With a training
            record, reheated copies or a cross-validation, or by words if `precision` is unknown: the most suspicious
            labels, as many as these.
        errors: How many labels are wrong; the ends come from two ways of counting, with 95 % intervals.
        precision: Share of the flagged labels that are wrong, low if few labels are; NaN if unknown.
        distinct: Wrong labels stand out as a group; if not, `errors` is a guess and `precision` unknown.
        reason: Why one network cannot tell how many are wrong; `errors` and `precision` are then NaN.
        reheated: The reheated copies that `suspicion` also rests on; says why if reheating was skipped.
        words_weight: Weight of the words that texts share in `suspicion`, beside 1 for everything else; 0 if inputs are
            not texts.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 4)
        >>> y = (x[:, 0] > 0).long()
        >>> y[7] = 1 - y[7]                                                   # a wrong label
        >>> net = torch.nn.Linear(4, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]]))      # trained
        >>> gram = lw.GramMatrix(net, (x, y))
        >>> found = lw.label_suspicion(gram)
        >>> found.suspicion.shape, found.flagged.dtype
        (torch.Size([200]), torch.bool)

    """

    suspicion: Tensor
    suggested: Tensor
    support: Tensor
    contested: Tensor
    isolated: Tensor
    chance_wrong: Tensor
    flagged: Tensor
    errors: Interval
    precision: Interval
    distinct: bool
    reason: str = ""
    reheated: Reheated | None = None
    words_weight: float = 0.0

    def __repr__(self) -> str:
        if self.reason:
            flags = f"{counted(len(self.suspicion), 'label')}, {int(self.flagged.sum())} flagged"
            todo = advice(reheated=self.reheated is not None and not self.reheated.skipped)
            return (
                f"LabelSuspicion({flags}; one network cannot tell how many are wrong. {self.reason} {todo})"
            )
        low, likely, high = (round(v) for v in self.errors)
        errors = f"about {likely} wrong ({low} to {high})" if self.distinct else f"at most about {high} wrong"
        sure = f", {self.precision.likely:.0%} of the flagged" if self.precision.likely > 0 else ""
        group = "" if self.distinct else "; they do not stand out as a group"
        flags = f"{counted(len(self.suspicion), 'label')}, {int(self.flagged.sum())} flagged"
        return f"LabelSuspicion({flags}; {errors}{sure}{group})"


def label_suspicion(
    gram: GramMatrix | CrossValidated,
    labels: Any = None,
    *,
    exponent: float = EXPONENT,
    isolated_below: float = 0.05,
    sketch: SketchOption = "auto",
    watch: Watch | None = None,
    reheat: Literal["auto"] | bool | Reheated | None = None,
    crossval: CrossValidated | None = None,
    words: bool = True,
) -> LabelSuspicion:
    """How much the network and the neighbors' votes contradict each label; visits all pairs.

    Every other sample votes for its own label with max(centered similarity, 0)^exponent. The belief b in each class is
    the mean of its share of the votes and the network's own probability, if the network's outputs are classes. Votes
    still detect labels that the network has memorized; before that, the network is the better judge. With y the label,
    suspicion is (1 − b(y) + max b(other)) / 2 + 0.1 log(1.01 / (b(y) + 0.01)), scaled to [0, 1]: the margin, plus how
    surprising the label is, which helps if the network confuses classes. A sample is isolated if it gets fewer votes
    than `isolated_below` times the median. Without any vote, suspicion is 0.

    With the record of the training run (`watch`), suspicion is the mean of two ranks instead: that of the suspicion
    above and that of −`watch.early_margins`, each from 0 (least suspicious) to 1 (most); ties share their mean rank.
    It then gives an order, not the strength of a contradiction. A sample without votes, or without a margin, gets the
    other rank alone. Everything else in the result is by votes, as without a record.

    A network that has memorized its labels can be reheated (`likewise.reheat`). Suspicion is then a weighted mean of
    ranks: 2 for the suspicion above, 2 for that by the reheated copies, 1 for −margin while they were hot, and 2 for
    −margin in the record of the training run, if there is one. Everything else in the result is by the copies, which
    have not memorized the labels. Each copy visits all pairs once more.

    With networks that have not seen the samples (`likewise.crossval`), their suspicion is one more rank of weight 2.
    Everything else in the result is by their probabilities, used as votes: they have memorized nothing.

    A network that reproduces 95 % of its labels may have memorized its votes, too. The weight of the suspicion above is
    then 2 ratio⁴. The ratio is the number of labels that its votes contest, divided by the largest number that the
    copies' votes, networks that have not seen the sample, or negative margins in the record contest; at most 1.

    If the inputs are texts (an nn.Embedding looks up an integer input as it is), suspicion is the mean of two ranks:
    that of the suspicion by everything above, with weight 1, and that by the words of a text, with weight 4 r³. The
    second is the cosine of a text's tokens with those of the other texts of the best other class, less that of its own
    (`likewise.statistics.shared_words`): no network can memorize it. r is the share of labels that words predict,
    divided by the share that votes predict (of the network, its copies, or networks that have not seen the samples),
    both beyond always naming the largest class; at most 1. Everything else in the result is as without words. Only if
    no precision is given, `flagged` names the most suspicious of the labels in doubt, as many as without words. A text
    without tokens gets the other rank alone. This reads the data once, and needs no gradients. Tables whose columns
    have names are not texts.

    If the network has memorized its labels, or separates classes badly, and no group of labels stands out, neighbors
    cannot judge: `errors` and `precision` are NaN, and `reason` says why. The order by suspicion is then still the best
    guess. Without a group that stands out, `chance_wrong` is NaN too.

    If classes overlap, right labels lose their votes too, but narrowly, about as often as they win narrowly. If such
    narrow losses explain most of the labels that lose, no group stands out.

    Args:
        gram: A square matrix; votes use centered similarities whether or not it is centered. Its readout should not
            look at the label (all_outputs, log_probabilities): similarity must not depend on what is in doubt. Or the
            result of `likewise.crossval`, to judge by that alone.
        labels: (n,) class numbers; None uses the labels of the data.
        exponent: How local votes are.
        isolated_below: Share of the median number of votes below which a sample is isolated.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).
        watch: Record of the training run, with the same samples and labels in the same order.
        reheat: "auto" reheats four copies of the network if it has memorized the labels; or the result of
            `likewise.reheat` for the same samples and labels, if you need your own augmentation, loss or rounds. None
            or False: no reheating.
        crossval: The result of `likewise.crossval` for the same samples and labels.
        words: Rank labels of texts also by the words that texts share; without effect on other inputs.

    Returns:
        LabelSuspicion; rank by `suspicion`, look at `flagged` first.

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 4)
        >>> y = (x[:, 0] > 0).long()
        >>> y[7] = 1 - y[7]                                                   # a wrong label
        >>> net = torch.nn.Linear(4, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]]))      # trained
        >>> gram = lw.GramMatrix(net, (x, y))
        >>> found = lw.label_suspicion(gram)
        >>> int(found.suspicion.argmax()), int(found.suggested[7]) != int(y[7])
        (7, True)

    """
    isolated_below = check_number("isolated_below", isolated_below, least=0)
    if isinstance(gram, CrossValidated):
        if labels is not None or crossval is not None or reheat:
            raise ValueError(
                "A cross-validation has its own labels and no network to reheat: pass it without labels, crossval or "
                "reheat."
            )
        margins = None if watch is None else margins_of(watch, gram.labels)
        return suspicion_from_votes(
            gram.probabilities, gram.labels, None, margins, isolated_below=isolated_below
        )
    refuse_unbounded(gram)
    if not gram.square:
        raise ValueError("Samples vote within one data set: build the GramMatrix without columns.")
    given = class_numbers(gram, labels)
    margins = None if watch is None else margins_of(watch, given)
    validated = None if crossval is None else validated_for(crossval, given)
    width = choose_width(gram, sketch)  # that of reheated copies, too
    votes = class_votes(gram, given, exponent=exponent, sketch=width).cpu()
    outputs = class_outputs(gram)
    chances = None if outputs is None else class_chances(outputs, given)
    if margins is not None and (odd := order_warning(votes, given, chances, margins)) is not None:
        warnings.warn(odd, stacklevel=2)
    if outputs is not None:
        _warn_of_weak_votes(gram, outputs, chances, given)
    options: dict[str, Any] = {"isolated_below": isolated_below, "dtype": gram.dtype}
    hot = None if reheat is None or reheat is False else _resolve_reheat(gram, given, votes, reheat)
    after = None
    if hot is not None and not hot.skipped:
        after = opinion_after(gram, hot, exponent=exponent, sketch=width)
    resemblance = class_resemblance(gram, given) if check_flag("words", words) else None
    found = combined_suspicion(votes, given, chances, margins, after, validated, resemblance, **options)
    tensors: dict[str, Any] = {
        name: value.to(gram.device) for name, value in found._asdict().items() if isinstance(value, Tensor)
    }
    return found._replace(**tensors, reheated=hot)


def advice(*, reheated: bool = False, validated: bool = False) -> str:
    """Return what to do if one network cannot tell how many labels are wrong, without what was done already."""
    ways = ["judge by a checkpoint of early training", "record margins while training (likewise.Watch)"]
    ways += [] if validated else ["cross-validate (likewise.crossval, likewise crossval)"]
    if not reheated:
        ways.append("reheat the network if it reproduces 95 % of the labels (likewise.reheat)")
    listed = f"{', '.join(ways[:-1])}{',' if len(ways) > 2 else ''} or {ways[-1]}"
    return f"{listed[0].upper()}{listed[1:]}. Or check 30 labels drawn by likewise.spot_check."


class OpinionAfter(NamedTuple):
    """What reheated copies of a network predict, as means over the copies."""

    ranks: Tensor  # (n,) of their suspicion
    votes: Tensor  # (n, classes) shares
    chances: Tensor | None  # (n, classes) probabilities, None if their outputs are not classes
    margins: Tensor  # (n,) while they were hot


def opinion_after(
    gram: GramMatrix, hot: Reheated, *, exponent: float = EXPONENT, sketch: SketchOption = "auto"
) -> OpinionAfter:
    """Return votes and probabilities of reheated copies; visits all pairs for each copy."""
    width = choose_width(gram, sketch)
    ranks, shares, chances = list[Tensor](), list[Tensor](), list[Tensor]()
    for one in hot.rounds:
        net = Network(one.model, gram.net.readout, parameters=gram.net.names, autocast=gram.net.autocast)
        other = GramMatrix(net, gram.data, kernel=gram.kernel, max_memory=gram.max_memory)
        votes = class_votes(other, hot.labels, exponent=exponent, sketch=width).cpu()
        outputs = class_outputs(other)
        known = None if outputs is None else class_chances(outputs, hot.labels)
        ranks.append(_relative_ranks(suspicion_from_votes(votes, hot.labels, known).suspicion.double().cpu()))
        shares.append(votes / votes.sum(1, keepdim=True).clamp(min=1e-300))
        chances += [] if known is None else [known.cpu()]
    mean = torch.stack(chances).mean(0) if chances else None
    return OpinionAfter(torch.stack(ranks).mean(0), torch.stack(shares).mean(0), mean, hot.margins)


def combined_suspicion(
    votes: Tensor,
    given: Tensor,
    chances: Tensor | None = None,
    margins: Tensor | None = None,
    after: OpinionAfter | None = None,
    validated: CrossValidated | None = None,
    resemblance: Tensor | None = None,
    *,
    isolated_below: float = 0.05,
    dtype: torch.dtype = torch.float32,
) -> LabelSuspicion:
    """Combine a network, its reheated copies, networks that have not seen the samples and words into one result.

    All of them contribute to suspicion. Everything else is by the best judge available: networks that have not seen
    the labels, then copies that have forgotten them, then the network. `resemblance` is of texts, (n, classes), see
    `class_resemblance`.
    """
    options: dict[str, Any] = {"isolated_below": isolated_below, "dtype": dtype}
    found = _combine_networks(votes, given, chances, margins, after, validated, **options)
    if resemblance is None:
        return found
    shares = votes if after is None else after.votes
    weight = _weight_of_words(resemblance, shares if validated is None else validated.probabilities, given)
    if weight == 0 or resemblance.shape[1] == 1:  # words say nothing, or there is one class
        return found
    mine = resemblance.gather(1, given[:, None])[:, 0]
    others = resemblance.scatter(1, given[:, None], -torch.inf).max(1).values
    by_words = torch.where(_has_words(resemblance), others - mine, torch.nan)
    suspicion = _mean_rank([(1.0, found.suspicion), (weight, by_words)])
    flagged = found.flagged
    if math.isnan(found.precision.likely):  # else it is the precision of these flags
        doubted = (found.suggested != given) & ~found.isolated
        flagged = _most_suspicious(suspicion, doubted, int(flagged.sum()))
    return found._replace(suspicion=suspicion.to(dtype), flagged=flagged, words_weight=weight)


def _weight_of_words(resemblance: Tensor, votes: Tensor, given: Tensor) -> float:
    """Return the weight of shared words beside 1 for everything else: small if votes predict more labels."""
    known = _has_words(resemblance)
    given = given[known]
    if len(given) == 0:
        return 0.0
    usual = float(given.bincount().max()) / len(given)  # by always naming the largest class
    words, network = (
        float((scores[known].argmax(1) == given).double().mean()) - usual for scores in (resemblance, votes)
    )
    if words <= 0:
        return 0.0
    return WORDS_WEIGHT * (min(1.0, words / network) if network > 0 else 1.0) ** WORDS_EXPONENT


def _has_words(resemblance: Tensor) -> Tensor:
    """Return which texts have tokens that differ from the mean of all texts, (n,)."""
    return (resemblance != 0).any(1)


def _combine_networks(
    votes: Tensor,
    given: Tensor,
    chances: Tensor | None,
    margins: Tensor | None,
    after: OpinionAfter | None,
    validated: CrossValidated | None,
    **options: Any,
) -> LabelSuspicion:
    more = [] if after is None else [(MARGIN_WEIGHT, -after.margins), (VOTES_WEIGHT, after.ranks)]
    more += [] if validated is None else [(VOTES_WEIGHT, validated.suspicion)]
    weight = _weight_of_votes(votes, given, chances, margins, after, validated)
    both = suspicion_from_votes(votes, given, chances, margins, more, weight=weight, **options)
    if validated is not None:
        found = suspicion_from_votes(validated.probabilities, given, **options)
    elif after is not None:
        judge = "The mean of the reheated copies"
        found = suspicion_from_votes(after.votes, given, after.chances, judge=judge, **options)
        if (
            not found.distinct
        ):  # the copies forgot right labels too: flag only what the network contests as well
            found = found._replace(flagged=found.flagged & both.contested)
    else:
        return both
    doubted = (found.suggested != given) & ~found.isolated
    flagged = _most_suspicious(both.suspicion, doubted, int(found.flagged.sum()))
    return found._replace(suspicion=both.suspicion, flagged=flagged)


def _weight_of_votes(
    votes: Tensor,
    given: Tensor,
    chances: Tensor | None,
    margins: Tensor | None,
    after: OpinionAfter | None,
    validated: CrossValidated | None,
) -> float:
    """Return the weight of a network's votes beside judges that have not memorized the labels.

    Votes that contest far fewer labels than such a judge does were memorized with the labels.
    """
    learned = 0.0 if chances is None else float((chances.argmax(1) == given).double().mean())
    if after is None and learned < MEMORIZED:
        return VOTES_WEIGHT
    others = [] if margins is None else [margins < 0]
    others += [] if after is None else [after.votes.argmax(1) != given]
    others += [] if validated is None else [validated.probabilities.argmax(1) != given]
    contested = int((votes.argmax(1) != given).sum())
    most = max((int(other.sum()) for other in others), default=0)
    return VOTES_WEIGHT if contested >= most else VOTES_WEIGHT * (contested / most) ** MEMORIZED_EXPONENT


def _most_suspicious(suspicion: Tensor, among: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` most suspicious labels within `among`, (n,)."""
    scores = torch.where(among, suspicion.double(), -torch.inf)
    chosen = torch.zeros_like(among)
    chosen[scores.argsort(descending=True, stable=True)[: min(count, int(among.sum()))]] = True
    return chosen


def order_warning(votes: Tensor, given: Tensor, chances: Tensor | None, margins: Tensor) -> str | None:
    """Return a warning if a training record does not match the network: it may be in another order; else None."""
    suspicion = suspicion_from_votes(votes, given, chances).suspicion.double()
    correlation = _correlation_within(given, suspicion, -margins.double())
    if math.isnan(correlation) or correlation > SAME_ORDER:
        return None
    return (
        "Within classes, training margins in the record and suspicion by this network have a rank correlation of "
        f"{correlation:.2f}; .8 is usual. The record seems to belong to another run, or to have the samples in another "
        "order. Ids passed to Watch.update must be positions in this data set (likewise.WithIndex)."
    )


def _correlation_within(classes: Tensor, one: Tensor, other: Tensor, least: int = 10) -> float:
    """Return the rank correlation within classes of at least `least` samples; NaN for fewer than 100 samples."""
    products, count = 0.0, 0
    for number in classes.unique():
        here = (classes == number) & ~one.isnan() & ~other.isnan()
        if int(here.sum()) < least:
            continue
        ranks = [_relative_ranks(values[here]) for values in (one, other)]
        standard = [(r - r.mean()) / r.std(correction=0).clamp(min=1e-12) for r in ranks]
        products, count = products + float((standard[0] * standard[1]).sum()), count + int(here.sum())
    return products / count if count >= 100 else math.nan


def validated_for(crossval: Any, given: Tensor) -> CrossValidated:
    """Return a cross-validation; raise unless it has these labels."""
    found = check_type("crossval", crossval, CrossValidated, "what likewise.crossval returned")
    if not torch.equal(found.labels, given):
        raise ValueError(
            f"The {len(found.labels):,} labels of the cross-validation differ from these {len(given):,}: it must have "
            "the same samples in the same order."
        )
    return found


def _resolve_reheat(gram: GramMatrix, given: Tensor, votes: Tensor, reheat: Any) -> Reheated:
    """Return the given reheated copies, or reheat the network."""
    if not gram.of_network:
        raise ValueError("Only a network can be reheated: build the GramMatrix of one, or leave out reheat.")
    if isinstance(reheat, Reheated):
        if not torch.equal(reheat.labels, given):
            raise ValueError(
                f"The network was reheated with {len(reheat.labels):,} labels, which differ from these {len(given):,}: "
                "reheat it with the same samples in the same order."
            )
        return reheat
    if reheat != "auto" and reheat is not True:
        raise TypeError(f'reheat must be "auto", False or a result of likewise.reheat, found {reheat!r}.')
    return reheat_network(gram.net, gram.data, labels=given, votes=votes, rounds=ROUNDS)


def margins_of(watch: Any, given: Tensor) -> Tensor:
    """Return the margins of a training record; raise unless it has these labels."""
    advice = "likewise.Watch.load(path) reads one from a file"
    return check_type("watch", watch, Watch, "a likewise.Watch", advice).margins_for(given)


def _warn_of_weak_votes(gram: GramMatrix, outputs: Tensor, chances: Tensor | None, given: Tensor) -> None:
    """Warn if votes or the network's predictions are worth less than they seem."""
    odd = accuracy_warning(chances, given)
    if chances is None and outputs.shape[1] > 1:
        odd = (
            f"Labels go up to {int(given.max())}, but the network has {outputs.shape[1]} outputs: these are not its "
            "classes, so only the neighbors judge the labels."
        )
    if readout_looks_at_label(gram):
        odd = (
            "The readout looks at the label, so similarity depends on what is in doubt: use likewise.all_outputs or "
            "log_probabilities to judge labels."
        )
    if odd is not None:
        warnings.warn(odd, stacklevel=3)


def suspicion_from_votes(
    votes: Tensor,
    given: Tensor,
    chances: Tensor | None = None,
    margins: Tensor | None = None,
    more: Sequence[tuple[float, Tensor]] = (),
    *,
    weight: float = VOTES_WEIGHT,
    isolated_below: float = 0.05,
    dtype: torch.dtype = torch.float32,
    judge: str = "The network",
) -> LabelSuspicion:
    """Judge labels by votes (n, classes) and the network's probabilities, (n, classes or more).

    Training margins, (n,), NaN if unknown, and `more` scores with their weights turn suspicion into a mean of ranks, in
    which votes and probabilities have `weight`: see `label_suspicion`. `judge` names whose votes and probabilities
    these are, for `reason`.
    """
    votes = votes.double()
    cast = votes.sum(1)
    own = torch.nn.functional.one_hot(given, votes.shape[1]).double()
    shares = torch.where(cast[:, None] > 0, votes / cast.clamp(min=1e-300)[:, None], own)
    isolated = (cast == 0) | (cast < isolated_below * cast.median())
    opinion = shares
    if chances is not None:
        wide = torch.nn.functional.pad(shares, (0, chances.shape[1] - shares.shape[1]))
        opinion = (wide + chances.double()) / 2
    mine = opinion.gather(1, given[:, None])[:, 0]
    others = opinion.scatter(1, given[:, None], -1)
    best, other = others.max(1) if others.shape[1] > 1 else (torch.zeros_like(mine), given)
    suspicion = torch.where(cast > 0, contradiction(mine, best), 0).clamp(0, 1)
    recorded = [] if margins is None else [(VOTES_WEIGHT, -margins)]
    if recorded or more:
        known = torch.where(cast > 0, suspicion, torch.nan)
        suspicion = _mean_rank([(weight, known), *recorded, *more])
    contested = (shares.argmax(1) != given) & ~isolated
    suggested = torch.where(contested | ((best > mine) & (cast > 0)), other, given)
    learned = None if chances is None else float((chances.argmax(1) == given).double().mean())
    found = estimate_noise(shares, given, learned, judge)
    flagged = contested & (found.chance >= (0.5 if found.separated else 0.8))
    ends = [float(c[flagged].mean()) for c in (found.chance, *found.both)]  # NaN if none is flagged
    least = found.errors.low / max(1, int(flagged.sum()))  # if no more labels are wrong than that
    if recorded or more:
        flagged = _most_suspicious(suspicion, (suggested != given) & ~isolated, int(flagged.sum()))
    precision = Interval(0.0, math.nan, 1.0)
    if found.distinct and not abs(ends[1] - ends[2]) > DISAGREEMENT:
        precision = Interval(min(least, *ends), ends[0], max(ends))
    unknown = Interval(math.nan, math.nan, math.nan)
    return LabelSuspicion(
        suspicion.to(dtype),
        suggested,
        opinion.gather(1, suggested[:, None])[:, 0].to(dtype),
        contested,
        isolated,
        found.chance.to(dtype) if found.distinct else torch.full_like(found.chance, torch.nan, dtype=dtype),
        flagged,
        unknown if found.reason else found.errors,
        unknown if found.reason else precision,
        found.distinct,
        found.reason,
    )


def _mean_rank(scores: Sequence[tuple[float, Tensor]]) -> Tensor:
    """Return the weighted mean of the ranks of known scores (NaN is unknown); 0 if none is known."""
    ranks = torch.stack([_relative_ranks(score.double().cpu()) for _, score in scores])
    weights = torch.tensor([weight for weight, _ in scores], dtype=torch.float64)[:, None] * ~ranks.isnan()
    return (ranks.nan_to_num(0) * weights).sum(0) / weights.sum(0).clamp(min=1e-300)


def _relative_ranks(values: Tensor) -> Tensor:
    """Return the rank of each value, from 0 for the smallest to 1 for the largest; ties share a rank, NaN has none."""
    known = ~values.isnan()
    _, place, counts = values[known].unique(return_inverse=True, return_counts=True)
    middle = counts.cumsum(0) - (counts + 1) / 2  # mean place of those that are equal, from 0
    ranks = torch.full_like(values, torch.nan)
    ranks[known] = (middle / max(1, int(known.sum()) - 1)).to(values)[place]
    return ranks


@dataclass(frozen=True)
class EvidenceReducer(Reducer):
    """The k most similar columns of each row among those that have the row's suggested label."""

    suggested: Tensor  # (n,)
    labels: Tensor  # (n,)
    k: int
    results: ClassVar[int] = 2
    centered: ClassVar[bool] = True

    def __call__(self, strip: Strip) -> tuple[Tensor, ...]:
        """Return indices and similarities, (b, k) each; -inf where a class has fewer samples."""
        wanted = self.suggested[strip.rows.start : strip.rows.stop, None] == self.labels
        similarity = strip.without_self(strip.centered, -torch.inf)
        return merge_largest(
            None, similarity.masked_fill_(~wanted.to(similarity.device), -torch.inf), 0, self.k
        )


def label_evidence(
    gram: GramMatrix,
    found: LabelSuspicion,
    labels: Any = None,
    k: int = 5,
    *,
    sketch: SketchOption = "auto",
) -> Neighbors:
    """The k most similar samples that have the suggested label of each sample; visits all pairs.

    Args:
        gram: The matrix that `found` was computed from.
        found: The result of `label_suspicion`.
        labels: The labels passed to it.
        k: Number of samples; if a class has fewer, the rest have similarity -inf.
        sketch: Numbers per sample of the random projections that are compared; None: gradients; "auto": gradients if
            that is cheap, else 1024 numbers (`likewise.SketchNotice`).

    Returns:
        Neighbors by centered similarity, (n, k).

    Example:
        >>> import torch, likewise as lw
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(200, 4)
        >>> y = (x[:, 0] > 0).long()
        >>> y[7] = 1 - y[7]                                                   # a wrong label
        >>> net = torch.nn.Linear(4, 2)
        >>> _ = net.weight.data.copy_(torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]]))      # trained
        >>> gram = lw.GramMatrix(net, (x, y))
        >>> found = lw.label_suspicion(gram)
        >>> lw.label_evidence(gram, found, k=3).indices.shape
        torch.Size([200, 3])

    """
    refuse_other(gram)
    check_type("found", found, LabelSuspicion, "what likewise.label_suspicion(gram) returns")
    given, count = class_numbers(gram, labels), min(check_integer("k", k, 1), gram.shape[1] - 1)
    suggested = found.suggested.cpu()
    if len(suggested) != gram.shape[0]:
        raise ValueError(
            f"`found` is about {len(suggested)} samples, but the GramMatrix has {gram.shape[0]}: pass the matrix that "
            "it was computed from."
        )
    source = pair_source(gram, sketch)
    ((indices, similarities),) = source.visit(EvidenceReducer(suggested, given, count))
    errors = source.standard_errors(indices, centered=True)
    return Neighbors(indices, similarities, errors.masked_fill_(similarities == -torch.inf, 0))
