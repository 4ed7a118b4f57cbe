"""The calls of a large network on two samples that all checks before the first number share.

A call takes long, so that each serves several purposes: the pass of plain autograd tells whether samples are
independent too, the recorded one is traced, measured, checked and used for a first result, and the trace needs a call
on one sample alone, which tells whether its outputs depend on others.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from likewise.data import Samples
from likewise.engines.comparison import PlainPass, plain_pass
from likewise.engines.independence import check_independent_samples
from likewise.engines.memory import MemoryMeter, is_out_of_memory
from likewise.engines.tracer import FirstRecorder, Layouts, PassRecorder, repeat_samples, trace_model
from likewise.model import Network
from likewise.torch_state import fast_attention, full_float32


class RecordedPass(NamedTuple):
    """A pass that was recorded, with its graph."""

    trace: Layouts
    recorder: FirstRecorder | PassRecorder
    meter: MemoryMeter  # of the memory that it took


@dataclass
class FirstPair:
    """Two samples, and the passes over them."""

    plain: PlainPass  # without autocast
    recorded: RecordedPass | None  # until it is taken: its graph serves once
    is_all: bool = False  # whether no other samples are compared

    @property
    def samples(self) -> Samples:
        """The two."""
        return self.plain.samples

    def take_recorded(self, net: Network) -> RecordedPass:
        """Return the recorded pass, recorded now if it was taken before or could not be recorded then.

        Raises:
            UntraceableError: The model cannot be traced.

        """
        recorded, self.recorded = self.recorded, None
        return recorded or _record_by_trace(net, self.samples)


def call_on_pair(net: Network, samples: Samples, alone: Tensor, *, is_all: bool, record: bool) -> FirstPair:
    """Return passes over the first two samples, once these were seen to be independent.

    Args:
        net: The network; call this inside `net.evaluation_mode`.
        samples: A few samples.
        alone: The outputs of the first of them alone, in full float32.
        is_all: Whether no other samples are compared. Else the two are taken in reverse: a model that sorts samples
            inside forward may find the first ones in order.
        record: Record a pass, for the traced engine.

    """
    place = 0 if is_all else 1  # of the first sample
    pair = repeat_samples(samples[:2], 2)[torch.tensor([place, 1 - place])]
    exact, known, recorded = net.exact(), {place: alone}, None
    with full_float32():
        plain = plain_pass(exact, pair)
        if record:
            recorded = _record_first(net, pair, pair[1 - place : 2 - place])
    if recorded is not None:
        known[1 - place] = recorded.alone
    check_independent_samples(exact, pair, plain.outputs.detach(), known if net.autocast is None else None)
    return FirstPair(plain, None if recorded is None else recorded.of_pair, is_all)


class _Recorded(NamedTuple):
    of_pair: RecordedPass
    alone: Tensor  # outputs of the sample that was traced alone


def _record_first(net: Network, pair: Samples, one: Samples) -> _Recorded | None:
    """Return a pass over two samples, traced by another over one of them, None if that fails for any reason."""
    meter, recorder = MemoryMeter(), FirstRecorder(net, pair)
    try:
        with fast_attention(next(iter(recorder.parameters.values())).device):
            with meter:
                recorder.run(net, pair)
            trace, alone = recorder.trace(net, one)
    except Exception as error:  # a trace by other numbers of samples may succeed, else it says why not
        if is_out_of_memory(error):
            raise
        return None
    return _Recorded(RecordedPass(trace, recorder, meter), alone)


def _record_by_trace(net: Network, pair: Samples) -> RecordedPass:
    """Return a pass over two samples, traced before by two and three samples."""
    trace, meter = trace_model(net, pair), MemoryMeter()
    recorder = PassRecorder(net, trace)
    with full_float32(), fast_attention(next(iter(recorder.parameters.values())).device), meter:
        recorder.record_pass(net, pair)
    return RecordedPass(trace, recorder, meter)
