"""Write a data set corrected by decisions as labels, a table, a folder of images or a Hugging Face dataset.

Existing data and runs are never modified.
"""

import hashlib
import json
import shutil
import tomllib
import warnings
from collections.abc import Callable, Mapping
from csv import QUOTE_NONNUMERIC
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from likewise import files
from likewise.checks import check_flag
from likewise.loading.images import SUFFIXES
from likewise.loading.imports import build_object, import_object, is_import
from likewise.loading.tables import MISSING, table_columns, text_lines
from likewise.runs.export import escape_formulas
from likewise.runs.result import Analysis
from likewise.version import VERSION
from likewise.wording import agreeing, counted

if TYPE_CHECKING:
    import pandas

MARK = "likewise-corrections.json"  # in folders that are written here, and only those are ever replaced
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (*SEPARATORS, ".jsonl", ".parquet")


@dataclass(frozen=True, eq=False)
class Corrections:
    """A data set corrected by decisions.

    Attributes:
        run: The reviewed run.
        labels: The class number of every sample, corrected, (n,).
        kept: Whether the sample remains, (n,).
        changes: The log, one row per decision: sample, name, action (relabeled, dropped, kept), label_before,
            label_after, verdict, suggested_label, label_suspicion, reason.

    Example:
        >>> import tempfile, torch, likewise as lw
        >>> x, y = torch.randn(60, 8), torch.arange(60) % 3
        >>> run = lw.analyze(torch.nn.Linear(8, 3), (x, y), out=tempfile.mkdtemp())
        >>> found = lw.apply_decisions(run, {0: 1, 4: "wrong"})
        >>> found.relabeled, found.dropped, len(found.table)
        (1, 1, 59)

    """

    run: Analysis
    labels: np.ndarray
    kept: np.ndarray
    changes: "pandas.DataFrame"

    @property
    def table(self) -> "pandas.DataFrame":
        """The samples that stay: number, name where there are names, label by name, and whether it was changed."""
        import pandas

        before, classes = self.run.table, np.array(self.run.manifest["classes"], dtype=object)
        columns: dict[str, Any] = {"sample": np.flatnonzero(self.kept)}
        if "name" in before:
            columns["name"] = before["name"].to_numpy()[self.kept]
        columns["label"] = classes[self.labels[self.kept]]
        columns["changed"] = (self.labels != before["label"].to_numpy())[self.kept]
        return pandas.DataFrame(columns)

    @property
    def relabeled(self) -> int:
        """How many samples have another label now."""
        return int((self.changes["action"] == "relabeled").sum())

    @property
    def dropped(self) -> int:
        """How many samples are left out."""
        return int((~self.kept).sum())

    def __repr__(self) -> str:
        return (
            f"Corrections({self.relabeled:,} relabeled, {self.dropped:,} dropped, {int(self.kept.sum()):,} of "
            f"{counted(len(self.kept), 'sample')} {agreeing(int(self.kept.sum()), 'stays', 'stay')})"
        )

    def write(
        self, to: str | Path, out: str | Path | None = None, *, data: Any = None, force: bool = False
    ) -> "Written":
        """Write the corrected data and NAME-changes.csv; see `likewise.apply_decisions` for the arguments."""
        source = _Source(self, data)
        form, path = _choose_form(str(to), out, source)
        path = path.absolute()
        log = path.with_name(f"{path.stem}-changes.csv")
        for place in (path, log):
            _refuse_place(place, source, check_flag("force", force))
        form.write(path, source, force)
        _write_table(log, self.changes)
        return Written(path, log)


class Written(NamedTuple):
    """Paths of corrected data and their log."""

    path: Path
    log: Path


class _Source:
    """The analyzed data set, and how to correct it."""

    def __init__(self, corrections: Corrections, data: Any) -> None:
        self.corrections, self.run = corrections, corrections.run
        self.classes: list[str] = self.run.manifest["classes"]
        text = (self.run.folder / "settings.toml").read_text(encoding="utf-8")
        self._settings = tomllib.loads(text)
        from likewise.runs.settings import (
            GIVEN_IN_PYTHON,  # what checks settings is imported for commands only
        )

        if data is None and self._settings["data"] != GIVEN_IN_PYTHON:
            data = self._settings["data"]
        self.data = Path(data).expanduser() if isinstance(data, str) and not is_import(data) else data

    @property
    def path(self) -> Path | None:
        """Where the data are, if they are a file or folder."""
        return self.data if isinstance(self.data, Path) else None

    @property
    def kind(self) -> str:
        """What the data are: folder, table, dataset (of Hugging Face) or other."""
        if self.path is not None:
            if self.path.is_dir():
                return "folder"
            return "table" if self.path.suffix.lower() in TABLES else "other"
        return "dataset" if self.data is not None and hasattr(self.dataset, "column_names") else "other"

    @cached_property
    def dataset(self) -> Any:
        """What was given in Python, or what an import string names."""
        if not isinstance(self.data, str):
            return self.data
        found: Any = import_object(self.data)
        ready = hasattr(found, "__getitem__") and not isinstance(found, type)
        return build_object(found, self.data, "the data set") if not ready and callable(found) else found

    @property
    def label_column(self) -> str:
        """The column of labels in a table or dataset."""
        there = list(self.dataset.column_names) if self.path is None else table_columns(self.path)
        wanted = [self._settings.get("label") or "label", "labels"]
        found = next((name for name in wanted if name in there), None)
        if found is None:
            raise ValueError(
                f"The data have no column {wanted[0]!r} of labels, only {', '.join(there[:10])}: write labels.csv."
            )
        return found

    def require(self, *kinds: str) -> None:
        """Raise unless the data are there, and of one of these kinds."""
        if self.path is not None and not self.path.exists():
            raise FileNotFoundError(
                f"There is no {self.path}, which the run was computed from: pass its new path with --data (data=)."
            )
        if self.kind not in kinds:
            what = "data that were given in Python" if self.data is None else str(self.data)
            raise ValueError(
                f"This form is for {' or '.join(_KINDS[kind] for kind in kinds)}, but the run used {what}: write "
                f"labels.csv, whose samples are numbered as in the run{self._given_data()}."
            )

    def _given_data(self) -> str:
        """Say that the data can be named, where the run knows which sample is which file or row."""
        return ", or give the data by --data (data=)" if "name" in self.run.table else ""

    def corrected_text(self, path: Path) -> str:
        """Return a .csv, .tsv or .jsonl table with every cell as it is written, but for the labels that changed."""
        import pandas

        column = self.label_column
        if path.suffix.lower() == ".jsonl":
            lines = [line for line in text_lines(path.read_text(encoding="utf-8")) if line.strip()]
            rows = [json.loads(line) for line in lines]
            labels = self._correct([row[column] for row in rows])
            for i, label in enumerate(labels):
                if rows[i][column] != label:
                    lines[i] = json.dumps({**rows[i], column: label}, ensure_ascii=False)
            stays = self._stays(len(lines))
            return "".join(f"{line}\n" for i, line in enumerate(lines) if stays[i])
        separator = SEPARATORS[path.suffix.lower()]
        frame = pandas.read_csv(path, sep=separator, dtype=str, keep_default_na=False, index_col=False)
        frame[column] = self._correct(frame[column].tolist())
        return frame[self._stays(len(frame))].to_csv(
            None, index=False, sep=separator, header=_own_header(path, separator)
        )

    def corrected_table(self) -> Any:
        """Return the table, with the types of its columns, as a pyarrow.Table."""
        import pandas
        import pyarrow
        import pyarrow.parquet

        assert self.path is not None
        if self.path.suffix.lower() == ".parquet":
            table = pyarrow.parquet.read_table(self.path, use_threads=False, pre_buffer=False)
        elif self.path.suffix.lower() == ".jsonl":
            text = self.path.read_text(encoding="utf-8")
            table = pyarrow.Table.from_pylist([json.loads(line) for line in text_lines(text) if line.strip()])
        else:
            separator = SEPARATORS[self.path.suffix.lower()]
            frame = pandas.read_csv(
                self.path, sep=separator, keep_default_na=False, na_values=list(MISSING), index_col=False
            )
            table = pyarrow.Table.from_pandas(frame, preserve_index=False)
        column = self.label_column
        place = table.schema.get_field_index(column)
        field = table.schema.field(place)
        corrected = pyarrow.array(self._correct(table[column].to_pylist()), type=field.type)
        table = table.set_column(place, field, corrected)
        return table.filter(pyarrow.array(self._stays(len(table))))

    def corrected_dataset(self) -> Any:
        """Return the Hugging Face dataset, with its features."""
        dataset, column = self.dataset, self.label_column
        feature, order = dataset.features[column], dataset.column_names
        corrected = self._correct(list(dataset[column]))
        changed = dataset.remove_columns([column]).add_column(column, corrected, feature=feature)
        return changed.select_columns(order).select(np.flatnonzero(self._stays(len(dataset))).tolist())

    def class_numbers(self, values: list[Any]) -> list[int]:
        """Return the class numbers of corrected labels."""
        known = self.corrections.labels[self.corrections.kept]
        numbers = {value: int(number) for value, number in zip(values, known, strict=False)}
        missing = [value for value in values if value not in numbers]
        if missing:
            raise ValueError(
                f"Only part of the data was analyzed, and {missing[0]!r} is not a class there: write table or parquet."
            )
        return [numbers[value] for value in values]

    def images(self) -> list[tuple[Path, str, int]]:
        """Return the images that stay: where they are, their names, and their class numbers."""
        assert self.path is not None
        if "name" not in self.run.table:
            raise ValueError(
                f"The run in {self.run.folder} does not know the files of its samples: write labels.csv, numbered "
                "as the run is, or analyze the folder itself."
            )
        names = self.run.table["name"].tolist()
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.path} has changed since the analysis: no {missing[0]}, {counted(len(missing), 'image')} "
                f"{agreeing(len(missing), 'is', 'are')} missing in all. Pass the path of the data with --data (data=)."
            )
        labels, kept = self.corrections.labels, self.corrections.kept
        found = [(self.path / name, name, int(labels[i])) for i, name in enumerate(names) if kept[i]]
        return [*found, *self._images_not_analyzed(set(names))]

    def _images_not_analyzed(self, known: set[str]) -> list[tuple[Path, str, int]]:
        """Return the images of classes that a limit left out of the run: they stay as they are."""
        assert self.path is not None
        found = []
        for number, name in enumerate(self.classes):
            inside = sorted((self.path / name).iterdir()) if (self.path / name).is_dir() else []
            for file in inside:
                own = f"{name}/{file.name}"
                if own not in known and file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
                    found.append((file, own, number))
        return found

    def _stays(self, rows: int) -> np.ndarray:
        """Return which rows stay; those after the ones that were analyzed do."""
        stays = np.ones(rows, dtype=bool)
        stays[: len(self.corrections.kept)] = self.corrections.kept
        return stays

    def _correct(self, values: list[Any]) -> list[Any]:
        """Return a column of labels with those that changed replaced, written as others of their class are."""
        before = self.run.table["label"].to_numpy().astype(int)
        if len(values) < len(before):
            raise ValueError(
                f"The data have changed since the analysis: {counted(len(values), 'row')}, expected {len(before):,}."
            )
        written: dict[int, Any] = {}
        for row, (value, number) in enumerate(zip(values, before, strict=False)):
            if not self._is_written(value, int(number)):
                raise ValueError(
                    f"The data have changed since the analysis: row {row} has the label {value!r}, and had the class "
                    f"{self.classes[number]!r}."
                )
            written.setdefault(int(number), value)
        found = list(values)
        for changed in np.flatnonzero(self.corrections.labels != before):
            new = int(self.corrections.labels[changed])
            found[changed] = written[new] if new in written else self._unseen(new, written)
        return found

    def _is_written(self, value: Any, number: int) -> bool:
        """Whether a label of the data stands for a class: its name or its number; 01 is 1 to a reader of tables."""
        if str(value) in (self.classes[number], str(number)):
            return True
        try:
            return float(value) == number
        except (TypeError, ValueError):
            return False

    def _unseen(self, number: int, written: Mapping[int, Any]) -> Any:
        """Return how a class is written that no row has: by name, or by number as the others are."""
        if all(str(value) == self.classes[key] for key, value in written.items()):
            return type(next(iter(written.values())))(self.classes[number])
        return type(next(iter(written.values())))(number)


def _own_header(path: Path, separator: str) -> list[str]:
    """Return column names as written in a table; pandas renames empty and duplicate ones."""
    import pandas

    first = pandas.read_csv(path, sep=separator, dtype=str, keep_default_na=False, header=None, nrows=1)
    return [str(name) for name in first.iloc[0]]


_KINDS = {
    "folder": "a folder of images",
    "table": "a .csv, .tsv, .jsonl or .parquet table",
    "dataset": "a Hugging Face dataset",
}


class Form(NamedTuple):
    """A form in which corrected data are written."""

    name: str  # of the file or folder, unless another is given
    write: Callable[[Path, _Source, bool], None]


def _write_labels(path: Path, source: _Source, force: bool) -> None:
    _write_table(path, source.corrections.table)


def _write_own_table(path: Path, source: _Source, force: bool) -> None:
    source.require("table")
    assert source.path is not None
    if path.suffix.lower() != source.path.suffix.lower():
        raise ValueError(
            f"The table is a {source.path.suffix} file: use the same suffix for the corrected one, or write parquet."
        )
    if path.suffix.lower() == ".parquet":
        _write_arrow(path, source.corrected_table())
    else:
        files.write_text(path, source.corrected_text(source.path))


def _write_parquet(path: Path, source: _Source, force: bool) -> None:
    import pyarrow

    if path.suffix.lower() != ".parquet":
        raise ValueError(f"A Parquet file must end in .parquet, found {path.name}.")
    if source.kind == "table":
        source.require("table")
        _write_arrow(path, source.corrected_table())
    else:
        _write_arrow(path, pyarrow.Table.from_pandas(source.corrections.table, preserve_index=False))


def _write_images(path: Path, source: _Source, force: bool) -> None:
    source.require("folder")
    _refuse_as_folders(source.classes)
    # those that stay in their folder first: they keep their names
    images = sorted(source.images(), key=lambda image: Path(image[1]).parent.name != source.classes[image[2]])

    def fill(folder: Path) -> None:
        taken: set[str] = set()
        for file, name, number in images:
            place = _free_place(source.classes[number], name, taken)
            (folder / place).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / place)
        _mark(folder, source)

    files.write_folder(path, fill, replace=force)


def _free_place(class_name: str, name: str, taken: set[str]) -> str:
    """Return where an image goes, under its own name unless one of another class has that."""
    own, origin = Path(name), Path(name).parent.as_posix().replace("/", "-")
    place, count = f"{class_name}/{own.name}", 1
    while place.casefold() in taken:  # also where a file system does not tell a from A
        number = "" if count == 1 else f"-{count}"
        place = f"{class_name}/{own.stem}-from-{origin}{number}{own.suffix}"
        count += 1
    taken.add(place.casefold())
    return place


def _refuse_as_folders(classes: list[str]) -> None:
    """Raise if class names cannot be folder names."""
    for name in classes:
        if not name or name.startswith(".") or any(sign in name for sign in "/\\:\0"):
            raise ValueError(f"The class {name!r} cannot be the name of a folder: write labels.csv instead.")


def _write_hf_dataset(path: Path, source: _Source, force: bool) -> None:
    source.require("folder", "table", "dataset")
    build = {"folder": _image_dataset, "table": _table_dataset, "dataset": _Source.corrected_dataset}
    dataset = build[source.kind](source)

    def fill(folder: Path) -> None:
        dataset.save_to_disk(str(folder))
        _mark(folder, source)

    files.write_folder(path, fill, replace=force)


def _image_dataset(source: _Source) -> Any:
    datasets = _hugging_face()
    images = source.images()
    columns = {
        "image": [str(file) for file, _, _ in images],
        "label": [number for _, _, number in images],
        "name": [name for _, name, _ in images],
    }
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=source.classes),
        "name": datasets.Value("string"),
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def _table_dataset(source: _Source) -> Any:
    import pyarrow

    datasets = _hugging_face()
    table, column = source.corrected_table(), source.label_column
    numbers = pyarrow.array(source.class_numbers(table[column].to_pylist()), pyarrow.int64())
    table = table.set_column(table.schema.get_field_index(column), column, numbers)
    dataset = datasets.Dataset(datasets.table.InMemoryTable(table.replace_schema_metadata(None)))
    return dataset.cast_column(column, datasets.ClassLabel(names=source.classes))


def _hugging_face() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "A Hugging Face dataset needs the package datasets: pip install datasets."
        ) from error
    return datasets


FORMS = {
    "labels.csv": Form("labels.csv", _write_labels),
    "table": Form("corrected", _write_own_table),
    "parquet": Form("corrected.parquet", _write_parquet),
    "folder": Form("corrected", _write_images),
    "hf-dataset": Form("corrected-dataset", _write_hf_dataset),
}


def _choose_form(to: str, out: str | Path | None, source: _Source) -> tuple[Form, Path]:
    """Return the form that was asked for, and where it goes."""
    ending = Path(to).suffix.lower()
    if to not in FORMS and out is None and ending in (".csv", ".parquet"):
        return FORMS["labels.csv" if ending == ".csv" else "parquet"], Path(to)
    name = "labels.csv" if to == "csv" else to
    if name not in FORMS:
        raise ValueError(
            f"There is no form {to!r}: choose {', '.join(FORMS)}, or a path that ends in .csv or .parquet."
        )
    if out is not None:
        return FORMS[name], Path(out)
    suffix = source.path.suffix if name == "table" and source.path is not None else ""
    return FORMS[name], Path(FORMS[name].name + suffix)


def _refuse_place(path: Path, source: _Source, force: bool) -> None:
    """Raise if writing there would touch the data, the run, or files not written by `apply`."""
    place, run = path.resolve(), source.run.folder.resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent}.")
    if place == run or run.is_relative_to(place) or place.is_relative_to(run / "index"):
        raise ValueError(f"{path} is the run itself: choose another place.")
    if place.parent == run and place.name in {*source.run.manifest["files"], "manifest.json", "report.html"}:
        raise ValueError(f"{path} is a file of the run itself: choose another place.")
    if source.path is not None:
        data = source.path.resolve()
        if place == data or place.is_relative_to(data) or data.is_relative_to(place):
            raise ValueError(
                f"{path} is, holds or is in the data set {source.path}, which is never written to."
            )
    if not path.exists():
        return
    if not force:
        raise FileExistsError(
            f"{path} exists already: choose another name, or pass --force (force=True) to replace it."
        )
    if path.is_dir() and not (path / MARK).exists():
        raise FileExistsError(
            f"{path} was not written by likewise apply, so it is not replaced, even with --force: choose another name."
        )


def _write_arrow(path: Path, table: Any) -> None:
    import pyarrow.parquet

    def write(file: BinaryIO) -> None:
        pyarrow.parquet.write_table(table, file)

    files.write_atomically(path, write, table.nbytes)


def _write_table(path: Path, table: "pandas.DataFrame") -> None:
    """Write a table of ours as .csv; what a spreadsheet would take for a formula is escaped, and said."""
    escaped = escape_formulas(table)
    texts = [name for name, dtype in table.dtypes.items() if dtype.kind not in "biuf"]
    changed = sum(int((escaped[name] != table[name]).sum()) for name in texts)
    if changed:
        warnings.warn(
            f"{counted(changed, 'text')} in {path.name} {agreeing(changed, 'starts', 'start')} like a formula of a "
            "spreadsheet and got an apostrophe in front; "
            "parquet keeps them as they are.",
            stacklevel=2,
        )
    files.write_text(path, escaped.to_csv(None, index=False, quoting=QUOTE_NONNUMERIC))


def _mark(folder: Path, source: _Source) -> None:
    """Say in a folder where it came from, by which it may be replaced."""
    corrections = source.corrections
    about = {
        "likewise": VERSION,
        "run": source.run.manifest["data"],
        "relabeled": corrections.relabeled,
        "dropped": corrections.dropped,
        "samples": int(corrections.kept.sum()),
        "labels_sha256": hashlib.sha256(corrections.labels.tobytes()).hexdigest(),
    }
    files.write_text(folder / MARK, json.dumps(about, indent=1) + "\n")
