"""kronfluence: pairwise scores with the identity for a Hessian, and self scores for norms."""

import logging
import tempfile
from collections.abc import Callable

from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments
from kronfluence.task import Task
from torch import Tensor, nn

from peers.work import Data, Work, only_scalar

Batch = tuple[Tensor, Tensor]


class _Sum(Task):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def compute_train_loss(self, batch: Batch, model: nn.Module, sample: bool = False) -> Tensor:
        x, y = batch
        return self.work.scalar(model(x), y).sum()

    def compute_measurement(self, batch: Batch, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)


def ready(work: Work, batch: int = 256) -> Callable[[], Tensor]:
    """Set-up is the fit of factors, of which the identity needs none."""
    only_scalar(work, "one loss a sample")
    folder = tempfile.TemporaryDirectory()
    model = prepare_model(work.model, task := _Sum(work))
    analyzer = Analyzer(
        "peers",
        model,
        task,
        cpu=True,
        log_level=logging.ERROR,
        disable_tqdm=True,
        output_dir=folder.name,
    )
    arguments = FactorArguments(strategy="identity")
    analyzer.fit_all_factors("none", work.left.dataset(), per_device_batch_size=batch, factor_args=arguments)

    def norms(data: Data) -> Tensor:
        analyzer.compute_self_scores(
            "self", "none", data.dataset(), per_device_train_batch_size=batch, overwrite_output_dir=True
        )
        return analyzer.load_self_scores("self")["all_modules"].sqrt()

    def matrix(folder: tempfile.TemporaryDirectory = folder) -> Tensor:
        analyzer.compute_pairwise_scores(
            "pairs",
            "none",
            query_dataset=work.right.dataset(),
            train_dataset=work.left.dataset(),
            per_device_query_batch_size=batch,
            per_device_train_batch_size=batch,
            overwrite_output_dir=True,
        )
        gram = analyzer.load_pairwise_scores("pairs")["all_modules"].T
        return gram / norms(work.left)[:, None] / norms(work.right) if work.normalized else gram

    return matrix
