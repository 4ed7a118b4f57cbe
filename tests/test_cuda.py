"""The same numbers on a GPU, with data on the host."""

import pytest
import torch

import likewise as lw
import nets

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:torch.func.vmap cannot differentiate Recurrent"),
]


def numbers(model, x, y):
    gram = lw.GramMatrix(model, lw.batches((x, y), size=4))
    centered = lw.GramMatrix(model, lw.batches((x, y), size=4), centered=True)
    denoised = lw.denoising(gram, draws=16)
    return [
        gram.dense(),
        lw.soft_neighbors(gram),
        lw.soft_neighbors(centered),
        lw.hard_neighbors(gram, 0.5).double(),
        lw.nearest(gram, 3).similarities,
        lw.uncertainty(gram),
        lw.disturbance(gram),
        denoised.factor,
        denoised.shift,
        denoised.smoothed_label,
        denoised.negative_share,
        lw.denoising(gram, exact=True).bound,
        lw.label_suspicion(gram).suspicion,
        lw.class_similarity(gram).mean,
        lw.fit_quality(gram).label_variance,
        lw.similarity_histogram(gram, 10).counts.double(),
        lw.predicted_move(lw.Network(model), x[:1], torch.ones(2), x),
        lw.lipschitz_bound(gram).square(),  # its root magnifies rounding where x' = x
        lw.GramMatrix(model, x[:3], x).dense(),
        lw.GramMatrix(lw.Network(model, lw.label_against_random(1)), (x, y)).dense(),
        lw.GramMatrix(model, x) @ torch.ones(len(x), 2, 1),
    ]


@pytest.mark.parametrize("make", list(nets.SHAPES), ids=lambda m: m.__name__)
def test_a_gpu_gives_the_numbers_of_the_host(make):
    model, x = nets.case(make, 2, 9)
    y = torch.arange(9) % 2
    expected = numbers(model, x, y)
    state = torch.cuda.get_rng_state()
    model.cuda()
    for found, value in zip(numbers(model, x, y), expected, strict=True):
        assert (found.cpu() - value).abs().nan_to_num().max() < 1e-6 * (1 + value.nan_to_num().abs().max())
    assert torch.equal(torch.cuda.get_rng_state(), state)
