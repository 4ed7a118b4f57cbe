"""Project inputs to the sketches of an index, and check that a model matches the index.

An index records its model, readout, parameters, precision and projection. A model that differs in one of them is
refused by name, because its sketches would not be comparable.
"""

import dataclasses
import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from likewise.data import Batches, Samples
from likewise.distributed import join_results
from likewise.engines import PartsChangedError
from likewise.engines.memory import equal_size
from likewise.gram import GramMatrix, Sketch, whiten_sketches
from likewise.gram.last_layer import Features, LastLayer
from likewise.gram.matrix import count_scores, finite_outputs, refuse_infinite_outputs
from likewise.gram.sketches import REPLICATES, sketch_bytes
from likewise.identity import fingerprint_code, fingerprint_model, precision_settings
from likewise.model import Network
from likewise.readouts import FACTORIES, NAMED, Readout, all_outputs, readout_name, reads_text
from likewise.version import VERSION

MOST_OUTPUTS = 64  # numbers per sample of the model's outputs that are stored
EXACT_OUTPUTS = 4  # so few are stored as float32
LONGER = 1.25  # texts of a batch are at most so many times as long as the shortest,
FEWEST = 16  # unless there are fewer than this
TOGETHER = 16  # samples that one rank projects, where all share a few
FEWEST_COMPARED, MOST_COMPARED = 64, 128  # samples by which the errors of a projection are told
COMPARED_SHARE = 16  # one sample in so many is compared, between these
KNOWN_SHARE = (
    20  # the same where sketches are known; no more than the fewest, which give a factor within 5 %:
)
# 95 % intervals then hold 94 to 96 % of similarities, and twice as many samples halve that (measured 2026-11-18)
LEAST_COMPARED = 32  # fewer pairs tell nothing
SHORTEST = 2  # tokens: with one position a layer's gradient would come in another form


class Projected(NamedTuple):
    """Whitened sketches of some samples."""

    sketches: Tensor  # (n, width), float32 or float64, on the CPU
    dead: Tensor  # (n,) whether the gradient is zero


class Projector:
    """The random projection of a network's whitened gradients.

    Args:
        gram: A matrix of the network, whose engine is used; its rows are the data of a build.
        buckets: Numbers for each output, see `fit_buckets`.
        seed: Of the projection.

    """

    def __init__(self, gram: GramMatrix, buckets: int, seed: int) -> None:
        self.gram, self.seed = gram, seed
        self.d = gram.d
        self._sketch = Sketch(buckets, seed)
        self._batch: int | None = None

    def compared(self, n: int) -> int:
        """Return how many of n samples are compared exactly, to tell the errors of this projection; 0 for none."""
        return 0 if n < FEWEST_COMPARED else min(MOST_COMPARED, max(FEWEST_COMPARED, n // COMPARED_SHARE))

    @property
    def width(self) -> int:
        """How many numbers a sketch has."""
        return self.d * self._sketch.q

    def facts(self, samples: Samples) -> dict[str, Any]:
        """Return what must be equal for sketches to match, from one sample."""
        with self.gram.net.evaluation_mode():
            layout = self._sketch.parts(self.gram.engine, samples[:1])
            dependent = self._sketch.dependent_buckets(self.gram.engine, samples[:1])
        draws = torch.randint(0, 2**31, (64,), generator=torch.Generator().manual_seed(self.seed))
        return {
            "width": self.width,
            "outputs": self.d,
            "buckets": self._sketch.q,
            "seed": self.seed,
            "layout": layout,
            "draws": hashlib.sha256(draws.numpy().tobytes()).hexdigest()[:16],
            **({"dependent": dependent} if dependent > 1 else {}),
        }

    def batches(self, data: Batches, where: range) -> Iterator[range]:
        """Yield the places of batches that fit into memory; the same for the same data, model and max_memory."""
        if self._batch is None:
            engine = self.gram.engine
            with self.gram.net.evaluation_mode():
                size = max(1, self._bytes_per_sample(data.samples(range(1))))
            fit = self.gram.max_memory // 2 // size
            self._batch = equal_size(data.size, min(fit, engine.gradient_batch_size or data.size))
        for start in range(where.start, where.stop, self._batch):
            yield range(start, min(start + self._batch, where.stop))

    def _bytes_per_sample(self, first: Samples) -> int:
        return sketch_bytes(self.gram.engine, first, self.gram.d)

    def project(self, samples: Samples, where: range) -> Projected:
        """Return the sketches of the samples at these places; call it inside `net.evaluation_mode`."""
        del where
        return self._by_length(samples, self._project_batch)

    def _project_batch(self, samples: Samples) -> Projected:
        try:
            sketched = self._sketch(self.gram.engine, samples)
        except PartsChangedError as error:
            raise ValueError(
                f"The model takes other branches for some samples ({error}), so one projection cannot serve all of "
                "them: leave these parameters out with parameters=[...], or pad inputs to one length."
            ) from error
        return Projected(whiten_sketches(sketched).cpu(), sketched.ranks.cpu() == 0)

    def _by_length(self, samples: Samples, project: Callable[[Samples], Projected]) -> Projected:
        """Return the sketches of texts, those of about one length at a time without padding, in their order."""
        if not reads_text(self.gram.net.readout):
            return project(samples)
        places, groups = split_by_length(samples)
        found = Projected(*map(torch.cat, zip(*map(project, groups), strict=True)))
        order = torch.cat(places).argsort()
        return Projected(found.sketches[order], found.dead[order])

    def project_all(self, data: Batches) -> Projected:
        """Return the sketches of a few samples, checked as every pass is."""
        with self.gram.net.evaluation_mode():
            spans = self.batches(data, range(data.n))
            parts = [self.project_query(data.samples(where)) for where in spans]
            self.gram.engine.finish_checks()
        return Projected(*map(torch.cat, zip(*parts, strict=True)))

    def project_query(self, samples: Samples) -> Projected:
        """Return the sketches of inputs that an index is asked about; call it inside `net.evaluation_mode`."""
        return Projector.project(self, samples, range(len(samples)))

    def sketch_some(self, data: Batches, places: list[int]) -> Tensor:
        """Return the sketches of some samples as rows of an index, (n, width), in float64; shared by all ranks."""
        some, engine = data.take(places), self.gram.engine

        def project(where: range) -> Tensor:
            return self.project(some.samples(where), where).sketches.double()

        with self.gram.net.evaluation_mode():  # batches that do not depend on the number of ranks
            next(self.batches(some, range(some.n)))
            spans = some.spans(min(TOGETHER, self._batch or TOGETHER))
            found: Tensor = join_results(project, spans, "a few sketches", self.gram, engine.finish_checks)
            return found


def split_by_length(samples: Samples) -> tuple[list[Tensor], list[Samples]]:
    """Return the places of texts of about one length, and these texts without the padding that all of them have.

    Only what is padded on the right is cut, and encoder-decoder models are left alone. At least 16 texts go together:
    smaller batches cost more than padding.
    """
    inputs, n = samples.inputs, len(samples)
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    whole = [torch.arange(n)], [samples]
    if not isinstance(mask, Tensor) or mask.dim() != 2 or "decoder_input_ids" in inputs:
        return whole
    known = (mask != 0).cpu()
    ends = (known * torch.arange(1, mask.shape[1] + 1)).amax(1).clamp(min=SHORTEST)
    order = ends.argsort(stable=True)
    starts, lengths = [0], ends[order].tolist()
    for place in range(1, n):
        is_longer = lengths[place] > LONGER * lengths[starts[-1]]
        if is_longer and place - starts[-1] >= FEWEST and n - place >= FEWEST:
            starts.append(place)
    groups = [order[a:b] for a, b in pairwise([*starts, n])]
    if len(groups) == 1 and lengths[-1] >= mask.shape[1]:
        return whole
    return groups, [_trim(samples[group], int(ends[group].max()), mask.shape) for group in groups]


def _trim(samples: Samples, length: int, shape: Sequence[int]) -> Samples:
    """Return texts cut to a length, of all tensors with an entry for each token."""

    def cut(value: Any) -> Any:
        has_tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == shape[1]
        return value[:, :length] if has_tokens else value

    return Samples(
        {name: cut(value) for name, value in samples.inputs.items()}, cut(samples.labels), samples.ids
    )


class KnownSketches(Projector):
    """Sketches that were computed before, by the same projection.

    Args:
        gram: The matrix of the network and the samples.
        buckets: Numbers for each output.
        seed: Of the projection.
        sketches: (n, width) of all rows.

    """

    def __init__(self, gram: GramMatrix, buckets: int, seed: int, sketches: Tensor) -> None:
        super().__init__(gram, buckets, seed)
        self._known = sketches

    def compared(self, n: int) -> int:
        """Return how many of n samples are compared exactly: a few, as no other gradient is formed."""
        count = min(FEWEST_COMPARED, n // KNOWN_SHARE)
        return count if count >= LEAST_COMPARED else 0

    def batches(self, data: Batches, where: range) -> Iterator[range]:
        """Yield the places of batches of the user's size: no gradient takes memory."""
        for start in range(where.start, where.stop, data.size):
            yield range(start, min(start + data.size, where.stop))

    def project(self, samples: Samples, where: range) -> Projected:
        """Return the sketches of the samples at these places."""
        del samples
        found = self._known[where.start : where.stop]
        return Projected(found, found.square().sum(1) == 0)

    def sketch_some(self, data: Batches, places: list[int]) -> Tensor:
        """Return the sketches of some samples, (n, width), in float64."""
        del data
        return self._known[places].double()


def fit_buckets(width: int, d: int) -> int:
    """Return how many sums a sketch of d outputs has for each, so that it has at most `width` numbers if it can.

    Buckets of a replicate are a prime number, so that no layer's width is a multiple; at least five.
    """
    buckets = max(5, width // (REPLICATES * d))
    while any(buckets % i == 0 for i in range(2, int(buckets**0.5) + 1)):
        buckets -= 1
    return REPLICATES * buckets


class SampleReader:
    """What the model says of samples, whatever the readout compares, and what its last layer sees.

    Read on the way of a pass that forms gradients, or by a forward pass of its own. No outputs where that is too much
    to store, no features where there is no such layer.

    Args:
        net: The network.
        first: A few samples, to see how many outputs there are.
        known: (n, c) outputs of all samples, if they were computed before.
        features: Of all samples, if `known` is given and there are any.

    """

    def __init__(
        self, net: Network, first: Samples, known: Tensor | None = None, features: Features | None = None
    ) -> None:
        self._net: Network | None = None
        self._layer: LastLayer | None = None
        self._known, self._features = known, features
        self._last: tuple[Tensor, ...] | None = None  # outputs and (h, 1) of the model's last call
        self._kept: list[tuple[Tensor, tuple[Tensor, ...]]] = []  # the same of samples, with their ids
        if known is not None:
            self.available = known.shape[1] <= MOST_OUTPUTS
            return
        if reads_text(net.readout):  # as many as tokens and words, which differ between texts
            self.available = False
            return
        self._net = net
        if net.readout is not all_outputs:
            self._net = Network(net.model, all_outputs, parameters=net.names, autocast=net.autocast)
        size = count_scores(net, first)
        if size is None:  # what the model returns, only the readout understands
            self._net = None
        self.available = size is not None and size <= MOST_OUTPUTS
        self._layer = None if self._net is None else LastLayer.find(self._net, first)

    def read(self, samples: Samples, where: range) -> tuple[Tensor | None, Features | None]:
        """Return outputs (n, c) and features of the samples at these places, as far as they are kept; evaluating."""
        if self._known is not None:
            part = slice(where.start, where.stop)
            features = (
                None if self._features is None else Features(*(value[part] for value in self._features))
            )
            return self._known[part] if self.available else None, features
        if not self._reads:
            return None, None
        outputs, features = self.take_kept(samples.ids) or self._read(samples)
        return outputs if self.available else None, features

    @contextmanager
    def observing(self, net: Network) -> Iterator[None]:
        """Read samples on the way of passes that form gradients of this network: `read` then calls no model."""
        if not self._reads:
            yield
            return
        watching = nullcontext(lambda: None) if self._layer is None else self._layer.watching()
        with watching as seen, net.observed_by(self):
            handle = net.model.register_forward_hook(partial(self._note, seen), with_kwargs=True)
            try:
                yield
            finally:
                handle.remove()
                self._last = None
                self._kept.clear()

    def take(self) -> tuple[Tensor, ...] | None:
        """Return outputs, and (h, 1) where there is such a layer, of the model's last call."""
        found, self._last = self._last, None
        return found

    def keep(self, ids: Tensor, found: tuple[Tensor, ...]) -> None:
        """Store what was read of samples until `read` asks for them."""
        self._kept.append((ids, found))

    def take_kept(self, ids: Tensor) -> tuple[Tensor, Features | None] | None:
        """Return what was read of these samples on the way of a pass, None if that is not known of all of them."""
        kept, self._kept = self._kept, []
        known = torch.cat([some for some, _ in kept]) if kept else ids[:0]
        last = slice(len(known) - len(ids), None)  # what comes before is of samples that were tried
        if len(known) < len(ids) or not torch.equal(known[last], ids):
            return None
        outputs, *vectors = (
            torch.cat(parts)[last] for parts in zip(*(found for _, found in kept), strict=True)
        )
        refuse_infinite_outputs(outputs, ids, masked=True)
        return outputs.cpu(), Features.compress(vectors[0]) if vectors else None

    @property
    def _reads(self) -> bool:
        return self._net is not None and (self.available or self._layer is not None)

    def _note(
        self, seen: Callable[[], Tensor | None], model: Any, arguments: Any, named: Any, returned: Any
    ) -> None:
        """Read what the model returned, before a readout can write to it."""
        assert self._net is not None
        with torch._C.DisableTorchFunction(), torch.no_grad():  # no operation of the model's
            outputs = self._net.select_outputs(returned, (arguments, named), None, None)
        vectors = seen()
        if self._layer is None:
            self._last = (outputs.clone(),)
        else:
            fits = vectors is not None and len(vectors) == len(outputs)
            self._last = (outputs.clone(), vectors) if vectors is not None and fits else None

    def read_all(self, data: Batches) -> tuple[Tensor | None, Features | None]:
        """Return outputs and features of a few samples; no outputs where only the readout understands them."""
        if self._net is None:
            return None, None
        with self._net.evaluation_mode():
            outputs, features = zip(*map(self._read, data), strict=True)
        if self._layer is None:
            return torch.cat(outputs), None
        return torch.cat(outputs), Features(*map(torch.cat, zip(*features, strict=True)))

    def _read(self, samples: Samples) -> tuple[Tensor, Features | None]:
        assert self._net is not None
        if self._layer is None:
            return finite_outputs(self._net, samples, masked=True).cpu(), None
        outputs, vectors = self._layer.read(samples)
        return outputs.cpu(), Features.compress(vectors)


def encode_outputs(outputs: Tensor) -> Tensor:
    """Return outputs as they are stored: float16, or float32 where there are few numbers or large ones."""
    wide = outputs.shape[1] <= EXACT_OUTPUTS or bool((outputs.abs() > 6e4).any())
    return outputs.float() if wide else outputs.half()


def describe_network(net: Network) -> dict[str, Any]:
    """Return what an index records about its network."""
    return {
        "model": fingerprint_model(net, settings=True),
        "model_name": type(net.model).__name__,
        "readout": _describe_readout(net.readout),
        "parameters": list(net.names),
        "precision": {"dtype": str(net.dtype), **precision_settings(net)},
        "versions": {"likewise": VERSION, "torch": version("torch")},
    }


def _describe_readout(readout: Readout) -> dict[str, Any]:
    arguments: dict[str, Any] | None = None
    if dataclasses.is_dataclass(readout) and not isinstance(readout, type):
        fields = [field for field in dataclasses.fields(readout) if field.init and field.compare]  # no caches
        values = {field.name: getattr(readout, field.name) for field in fields}
        plain = all(value is None or isinstance(value, bool | int | float | str) for value in values.values())
        arguments = values if plain else None
    name = getattr(readout, "__name__", type(readout).__name__)
    return {"name": name, "arguments": arguments, "fingerprint": fingerprint_code(readout)}


def describe_recorded_readout(described: Mapping[str, Any]) -> str:
    """Return what the readout of an index is called: a user's own by the name that is recorded."""
    try:
        return readout_name(recover_readout(described))
    except ValueError:  # it cannot be had without the user's code, and a name needs none
        return str(described["name"])


def recover_readout(described: Mapping[str, Any]) -> Readout:
    """Return the readout that an index was built with, if it is one of this package.

    Raises:
        ValueError: It is the user's own, and has to be given.

    """
    candidates = list(NAMED.values())
    if described["arguments"] is not None:
        named = described["arguments"]
        candidates += [
            factory(**named)
            for factory in FACTORIES
            if set(inspect.signature(factory).parameters) == set(named)
        ]
    for readout in candidates:
        if fingerprint_code(readout) == described["fingerprint"]:
            return readout
    raise ValueError(
        f"The index was built with a custom readout, {described['name']!r}: pass it, Index(folder, model=model, "
        "readout=...)."
    )


def refuse_other_version(there: Mapping[str, Any], what: str) -> None:
    """Raise if another version of likewise built an index: its sketches may be drawn otherwise."""
    built = there["versions"]["likewise"]
    if built != VERSION:
        raise ValueError(
            f"{what} belongs to another version of likewise ({built}, here {VERSION}): rebuild it with this one."
        )


def refuse_other_network(there: Mapping[str, Any], here: Mapping[str, Any], what: str) -> None:
    """Raise, by name, if an index was built with another model, readout, parameters or precision.

    Args:
        there: The index's manifest.
        here: What `describe_network` says of the network at hand.
        what: What the index is called in the message.

    """
    for name, advice in (
        (
            "model",
            "open it with the model, code and weights, that it was built with, or build an index of this one",
        ),
        ("readout", "give readout= as it was built"),
        ("parameters", "give parameters= as it was built"),
    ):
        if there[name] != here[name]:
            raise ValueError(
                f"{what} is of another {name}{tell_difference(there[name], here[name])}: {advice}."
            )
    for name in ("dtype", "autocast"):
        if there["precision"][name] != here["precision"][name]:
            found = tell_difference(there["precision"], here["precision"])
            raise ValueError(
                f"{what} is of another precision{found}: convert the model, or build an index of this one."
            )
    if there["precision"] != here["precision"]:
        warnings.warn(
            f"{what} was built in another precision{tell_difference(there['precision'], here['precision'])}: "
            "similarities are off by about 1e-3, less than their standard errors.",
            stacklevel=3,
        )


def refuse_other_projection(there: Mapping[str, Any], here: Mapping[str, Any], what: str) -> None:
    """Raise if the sketches of a projection are not comparable with those of an index."""
    if there != here:
        raise ValueError(
            f"{what} has another projection{tell_difference(there, here)}: gradients of this model, on this machine "
            "and with these versions, come in other parts than those of the index. Build the index again where it is "
            "used, of inputs that include some like these."
        )


def describe_inputs(samples: Samples) -> list[list[Any]]:
    """Return name, dtype and shape of every tensor of a sample."""
    leaves, _ = tree_flatten_with_path(samples.inputs)
    return [
        [keystr(path), str(leaf.dtype), list(leaf.shape[1:])]
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    ]


def refuse_other_inputs(there: list[list[Any]], samples: Samples) -> None:
    """Raise if new inputs have other names, types or shapes than those of the index."""
    here = describe_inputs(samples)
    if [_comparable(*entry) for entry in there] == [_comparable(*entry) for entry in here]:
        return
    hint = ""
    if len(here) == len(there) == 1 and here[0][2] == there[0][2][1:]:
        hint = " One sample alone needs x[None]."
    raise ValueError(
        f"The index holds inputs {_format_inputs(there)} per sample, found {_format_inputs(here)}: prepare new "
        f"inputs like those of the index, samples along the first dimension.{hint}"
    )


def repeat_tokens(samples: Samples, there: list[list[Any]]) -> Samples:
    """Return texts in the shape of an index's inputs: shorter ones once more from the start, longer ones cut.

    Labels that have one for each token change with them. Texts without tokens stay as they are.
    """
    shapes = {name: shape for name, _, shape in there}
    changed: dict[tuple[int, ...], list[int]] = {}

    def reshape(value: Tensor, shape: list[int]) -> Tensor:
        repeats = [-(-wanted // here) for wanted, here in zip(shape, value.shape[1:], strict=True)]
        return value.repeat(1, *repeats)[(slice(None), *map(slice, shape))]

    def reshape_input(path: Any, value: Any) -> Any:
        shape = shapes.get(keystr(path)) if isinstance(value, Tensor) else None
        if not shape or value.is_floating_point() or list(value.shape[1:]) == shape or not value.numel():
            return value
        changed[tuple(value.shape[1:])] = shape
        return reshape(value, shape)

    inputs, labels = tree_map_with_path(reshape_input, samples.inputs), samples.labels
    if labels is not None and not labels.is_floating_point() and tuple(labels.shape[1:]) in changed:
        labels = reshape(labels, changed[tuple(labels.shape[1:])])
    return Samples(inputs, labels, samples.ids)


def _comparable(name: str, dtype: str, shape: list[int]) -> tuple[Any, ...]:
    """Return what must agree: of floating inputs the shape, of integers (tokens) the number of dimensions."""
    floating = "float" in dtype
    return name, floating, tuple(shape) if floating else len(shape)


def _format_inputs(entries: list[list[Any]]) -> str:
    return ", ".join(
        f"{name} {dtype.removeprefix('torch.')} {tuple(shape)}".strip() for name, dtype, shape in entries
    )


def tell_difference(there: Any, here: Any) -> str:
    """Return what differs, where that can be told in words."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        apart = [name for name in here if there.get(name) != here[name] and name != "fingerprint"]
        pairs = ", ".join(f"{name}: there {there.get(name)!r:.60}, here {here[name]!r:.60}" for name in apart)
        return f" ({pairs})" if pairs else ""
    if isinstance(there, list) and isinstance(here, list):
        return f" (there {len(there)}, here {len(here)})" if len(there) != len(here) else ""
    return ""
