"""Load the model and the data set named on a command line.

    model   an import string and a weights file, or a folder written by save_pretrained
    data    a folder of images, .csv, .tsv, .parquet, .jsonl, .npz, or an import string

An import string is `package.module:object` or `path/to/file.py:object`, and runs the code it names. Files of
data and weights never run code: no pickle is read.
"""

from likewise.loading.dataset import Read
from likewise.loading.imports import import_object
from likewise.loading.load import data, model, new_inputs, pasted_input
from likewise.loading.models import PretrainedFolder, is_pretrained

__all__ = [
    "PretrainedFolder",
    "Read",
    "data",
    "import_object",
    "is_pretrained",
    "model",
    "new_inputs",
    "pasted_input",
]
