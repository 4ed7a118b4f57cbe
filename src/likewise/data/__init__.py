"""Where samples come from: every kind of data set, read by position.

Every statistic reads the data at least twice and refers to samples by number, so the order must hold:
what shuffles or augments at random is refused.

    columns   columns of tables, and which part of a data set is the labels
    sources   samples by position, from tensors or read one by one
    batches   what the rest of the package reads: batches in a fixed order, of any kind of data set
"""

from likewise.data.batches import Batches, Samples, batches, join_labels, training_data
from likewise.data.columns import column

__all__ = ["Batches", "Samples", "batches", "column", "join_labels", "training_data"]
