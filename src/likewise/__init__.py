"""Which inputs does a neural network treat alike?

Two inputs are similar when a parameter update moves both outputs alike: the normalized inner product of their
gradients. Wrap a model in a `Network`, compare a data set with itself or with another in a `GramMatrix`, and pass
that to a statistic; or let `analyze` do all of it and write a report.

Where things are; a module imports only from those above it:

    checks, linalg, files, locks, ...   of arguments, numbers and files; know nothing of the rest
    readouts, kernels                   which outputs of a model are compared, and by which formula
    loading                             models and data sets that are named on the command line
    distributed, liveness, fingerprint  the same work shared by several processes, and that they agree
    watch                               a record of training: margins, losses, forgetting
    model, data                         a module in evaluation mode; batches of any data set
    report                              the HTML page of a run folder
    engines                             gradients of each sample: a rule for each operation, checked by a reference
    losses                              similarity as a training term
    gram                                similarities of all pairs: products, strips of rows, centering, sketches
    statistics                          neighbors, label issues, novelty, reliability, ...
    index                               sketches of a data set on disk, to ask about new inputs later
    runs                                `analyze`: statistics as columns of a table; settings, exports, comparison
    integrations                        callbacks for trainers, estimators for scikit-learn, samplers
    components, serve                   the live page of a run or an index: `likewise serve`
    cli                                 the commands; their options are declared in runs.settings

`figures` draws what any of them returns. CONTRIBUTING.md says which file to edit for what.
"""

from likewise import figures, losses
from likewise.data import Batches, Samples, batches
from likewise.distributed import RankMismatchError, RemoteError
from likewise.engines import DependentSampleError, GradientMismatchError, ZeroGradientWarning
from likewise.gram import (
    GramMatrix,
    MatchedPassages,
    Plan,
    SketchNotice,
    matched_passages,
    perceptual,
    similarity,
)
from likewise.index import (
    Index,
    TargetScores,
    build_index,
    diversity,
    merge_indexes,
    pooled_states,
    score_targets,
    select,
    select_by_states,
)
from likewise.kernels import (
    CORRELATION,
    IDENTITY_DISTANCE,
    INFLUENCE,
    INNER_PRODUCT,
    NEAR_IDENTITY,
    ROTATION_INVARIANT,
    SUBSPACE_MATCH,
    Kernel,
    best_rotation,
    identity_distance,
    mean_diagonal,
    near_identity,
    reduction,
    subspace_match,
    whole_block,
)
from likewise.liveness import RankLostError, rank_timeout
from likewise.model import Network
from likewise.readouts import (
    CompletionPairs,
    ReadoutNotice,
    all_outputs,
    class_contrasts,
    completion_against_alternative,
    label_against_random,
    label_against_rest,
    log_probabilities,
    one_output,
    predicted_class,
    projected_outputs,
    sequence_log_likelihood,
    token_log_likelihood,
)
from likewise.runs.analyze import analyze, analyze_part
from likewise.runs.apply import apply_decisions
from likewise.runs.corrected_data import Corrections
from likewise.runs.result import Analysis
from likewise.sharding import gather_model
from likewise.statistics.crossval import CrossValidated, crossval
from likewise.statistics.denoising import Denoising, denoising
from likewise.statistics.duplicates import Duplicates, duplicates
from likewise.statistics.fit import FitQuality, fit_quality
from likewise.statistics.label_issues import LabelSuspicion, label_evidence, label_suspicion
from likewise.statistics.lipschitz import lipschitz_bound
from likewise.statistics.neighbors import (
    ClassSimilarity,
    Neighbors,
    SimilarityHistogram,
    class_similarity,
    hard_neighbors,
    nearest,
    positive_neighbors,
    similarity_histogram,
    soft_neighbors,
)
from likewise.statistics.novelty import novelty
from likewise.statistics.reheat import Reheated, reheat
from likewise.statistics.reliability import (
    Calibration,
    CalibrationWarning,
    Reliability,
    calibrate,
    reliability,
)
from likewise.statistics.spot_check import SpotCheck, SpotCheckEstimate, spot_check
from likewise.statistics.target_issues import (
    CellSuspicion,
    MultilabelSuspicion,
    ValueSuspicion,
    cell_suspicion,
    multilabel_suspicion,
    value_suspicion,
)
from likewise.statistics.uncertainty import disturbance, predicted_move, uncertainty
from likewise.version import VERSION
from likewise.watch import Watch, WithIndex

__version__ = VERSION

__all__ = [
    "CORRELATION",
    "IDENTITY_DISTANCE",
    "INFLUENCE",
    "INNER_PRODUCT",
    "NEAR_IDENTITY",
    "ROTATION_INVARIANT",
    "SUBSPACE_MATCH",
    "Analysis",
    "Batches",
    "Calibration",
    "CalibrationWarning",
    "CellSuspicion",
    "ClassSimilarity",
    "CompletionPairs",
    "Corrections",
    "CrossValidated",
    "Denoising",
    "DependentSampleError",
    "Duplicates",
    "FitQuality",
    "GradientMismatchError",
    "GramMatrix",
    "Index",
    "Kernel",
    "LabelSuspicion",
    "MatchedPassages",
    "MultilabelSuspicion",
    "Neighbors",
    "Network",
    "Plan",
    "RankLostError",
    "RankMismatchError",
    "ReadoutNotice",
    "Reheated",
    "Reliability",
    "RemoteError",
    "Samples",
    "SimilarityHistogram",
    "SketchNotice",
    "SpotCheck",
    "SpotCheckEstimate",
    "TargetScores",
    "ValueSuspicion",
    "Watch",
    "WithIndex",
    "ZeroGradientWarning",
    "all_outputs",
    "analyze",
    "analyze_part",
    "apply_decisions",
    "batches",
    "best_rotation",
    "build_index",
    "calibrate",
    "cell_suspicion",
    "class_contrasts",
    "class_similarity",
    "completion_against_alternative",
    "crossval",
    "denoising",
    "disturbance",
    "diversity",
    "duplicates",
    "figures",
    "fit_quality",
    "gather_model",
    "hard_neighbors",
    "identity_distance",
    "label_against_random",
    "label_against_rest",
    "label_evidence",
    "label_suspicion",
    "lipschitz_bound",
    "log_probabilities",
    "losses",
    "matched_passages",
    "mean_diagonal",
    "merge_indexes",
    "multilabel_suspicion",
    "near_identity",
    "nearest",
    "novelty",
    "one_output",
    "perceptual",
    "pooled_states",
    "positive_neighbors",
    "predicted_class",
    "predicted_move",
    "projected_outputs",
    "rank_timeout",
    "reduction",
    "reheat",
    "reliability",
    "score_targets",
    "select",
    "select_by_states",
    "sequence_log_likelihood",
    "similarity",
    "similarity_histogram",
    "soft_neighbors",
    "spot_check",
    "subspace_match",
    "token_log_likelihood",
    "uncertainty",
    "value_suspicion",
    "whole_block",
]
