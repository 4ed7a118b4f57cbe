"""The options of a run, declared once for the command line, Python and settings.toml."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from likewise.readouts import NAMED
from likewise.thumbnails import EXCERPT

GIVEN_IN_PYTHON = "(given in Python)"
PATHS = (
    "model",
    "data",
    "weights",
    "prepare",
    "show",
    "readout",
    "watch",
    "crossval",
    "base_model",
)  # paths, or import strings with one


READING = ("label", "text_column", "columns", "image_size", "gray", "prepare")  # how samples are read
INPUTS = (
    "model",
    "data",
    "weights",
    *READING,
    "task",
    "max_length",
    "base_model",
    "allow_pickle",
    "follow_links",
    "limit",
    "readout",
    "parameters",
    "max_memory",
    "device",
)  # what every command that opens a model and data takes


def _split_names(given: Any) -> Any:
    """Split a comma-separated string into a tuple of names; return anything else unchanged."""
    return (
        tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given
    )


Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]


class Settings(BaseModel):
    """All options of a run, declared once.

    The command line takes names, defaults and help texts from here (`likewise.cli.options`); settings.toml is a dump.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        description="The model: `package.module:object` or `path/to/file.py:object`, an nn.Module or a function that "
        "returns one; a folder written by save_pretrained (transformers, peft); or the settings.toml of a run, to "
        "repeat it."
    )
    data: str = Field(
        description="The data: a folder with one subfolder of images per class, a .csv, .tsv, .parquet, .jsonl or .npz "
        "file, or an import string."
    )
    weights: str | None = Field(
        default=None, description="A state dict: .safetensors, or a file written by torch.save."
    )
    label: str | None = Field(default=None, description="The column (or array) that holds the labels.")
    text_column: str | None = Field(
        default=None,
        description="The column of texts, read by the tokenizer in the model's folder or by --prepare. Two columns, "
        "separated by a comma, are sentence pairs or prompt and completion.",
    )
    columns: Names | None = Field(
        default=None,
        description="The input columns, separated by commas; by default, all numeric columns.",
    )
    image_size: int | None = Field(
        default=None, ge=1, description="Resize images to a square with sides of this many pixels."
    )
    gray: bool = Field(default=False, description="Read images as grayscale, one channel.")
    prepare: str | None = Field(
        default=None,
        description="Import string of a function that turns one raw sample into the model's input.",
    )
    task: Literal["causal-lm", "sequence-classification"] | None = Field(
        default=None,
        description="The task of a model in a folder; by default, its configuration decides.",
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="Truncate texts to this many tokens; by default, the model's maximum, up to 1,024.",
    )
    base_model: str | None = Field(
        default=None,
        description="The folder with the base model of a peft adapter, if it has moved.",
    )
    allow_pickle: bool = Field(
        default=False,
        description="Also read weights in a model folder that torch.save wrote (tensors only).",
    )
    show: str | None = Field(
        default=None,
        description="Import string of a function from a sample's number to what the report shows of it: an image, a "
        "text, a dict or an array.",
    )
    show_columns: Names | None = Field(
        default=None,
        description="Columns that the report shows besides inputs and label, separated by commas; it contains no "
        "others.",
    )
    excerpt_length: int = Field(
        default=EXCERPT, ge=1, description="How many characters of each text the report shows."
    )
    passages: int | None = Field(
        default=None,
        ge=0,
        description="Causal language models only: for this many texts, the most novel first, the report marks the "
        "passages of three neighbors that the similarity rests on. Costs about eight training steps per neighbor. By "
        "default one text in 200, at least 8 and at most 32; 0 for none.",
    )
    follow_links: bool = Field(
        default=False, description="Follow links in a folder of images that lead outside of it."
    )
    classes: Names | None = Field(
        default=None,
        description="Class names in the order of the model's outputs, separated by commas.",
    )
    limit: int | None = Field(default=None, ge=1, description="Use at most this many samples.")
    readout: str = Field(
        default="auto",
        description="The outputs whose gradients are compared: auto, projected_outputs(8), class_contrasts(8), "
        f"{', '.join(NAMED)}, or an import string.",
    )
    parameters: Names | None = Field(
        default=None,
        description="Use only these parameters, separated by commas: `layer4.*,fc.*`, or `adapters` for those of peft.",
    )
    neighbors: int = Field(default=10, ge=1, description="How many neighbors to keep per sample.")
    threshold: float = Field(
        default=0.5,
        ge=-1,
        le=1,
        description="Similarity from which a sample counts as a hard neighbor; a multiple of 0.05.",
    )
    sketch: Literal["auto", "never"] | int = Field(
        default="auto",
        description="Compare random projections of gradients instead of all exact pairs: auto (if there are many "
        "pairs), never, or the numbers per sample.",
    )
    exact: bool = Field(
        default=False,
        description="Compare the gradients of all outputs for all pairs, without sketches; often costs a hundred times "
        "as much.",
    )
    layout: Literal["neighbors", "pca", "umap"] = Field(
        default="neighbors",
        description="How to lay out the map: from the neighbors, by two principal components (pca), or by umap (an "
        "extra).",
    )
    watch: str | None = Field(
        default=None,
        description="The record of the training run, written by likewise.Watch.save; ranks suspicious labels better.",
    )
    reheat: bool = Field(
        default=False,
        description="If the network has memorized the labels, also judge them by copies of it that are trained "
        "further.",
    )
    crossval: str | None = Field(
        default=None,
        description="The folder of likewise crossval; also judges labels by networks that have not seen them.",
    )
    no_words: bool = Field(
        default=False, description="Do not rank labels of texts also by the words that texts share."
    )
    no_index: bool = Field(
        default=False, description="Do not keep the run's sketches as an index for likewise ask."
    )
    max_memory: ByteSize | None = Field(
        default=None,
        ge=1,
        description="Memory for gradients and pairs, besides the model, such as 4GB; by default, half of what is free.",
    )
    device: str = Field(default="cpu", description="Where the model runs: cpu, cuda, cuda:1, mps.")

    def naming_columns(self, columns: Sequence[str] | None) -> "Settings":
        """Return the settings with these input columns if none were named, because new rows are read by name."""
        if columns is None or self.columns is not None:
            return self
        return self.model_copy(update={"columns": tuple(columns)})

    def text(self, command: str = "analyze") -> str:
        """Return the settings of a command as TOML, without those that are not set.

        Paths inside the current folder are relative to it, and paths inside the home folder start with ~, so that the
        file can be shared without revealing where its author keeps files.
        """
        import tomlkit

        known = {name: value for name, value in self.model_dump(mode="json").items() if value is not None}
        known |= {name: _portable(known[name]) for name in PATHS if name in known}
        asked = "index" if command == "index" else "run"
        document = tomlkit.document()
        document.add(
            tomlkit.comment(
                f"What this {asked} was asked for, by likewise.{command} in Python."
                if self.model == GIVEN_IN_PYTHON
                else f"What this {asked} was asked for. It starts the same {asked} again: likewise {command} THIS_FILE"
            )
        )
        for name, value in known.items():
            document.add(name, value)
        return tomlkit.dumps(document)


def _portable(text: str) -> str:
    """Return a path, or an import string with one, relative to the current or the home folder if it is inside."""
    path = Path(text)
    if not path.is_absolute():
        return text
    for folder, prefix in ((Path.cwd(), ""), (Path("~").expanduser(), "~/")):
        if path != folder and path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return text


def read_settings(path: str | Path) -> Settings:
    """Return the settings in a TOML file.

    Raises:
        ValueError: The file is not TOML, a setting is wrong, or model or data were given in Python.

    """
    try:
        known: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}.") from error
    try:
        found = Settings(**known)
    except ValidationError as error:
        raise ValueError(f"{path}: {describe_errors(error)}") from error
    if GIVEN_IN_PYTHON in (found.model, found.data):
        raise ValueError(
            f"{path} comes from a run started in Python, with a model or data that have no import string. "
            "Repeat it from Python, or write import strings for model and data into the file."
        )
    return found


def locate_paths(settings: Settings, folder: Path, needed: Sequence[str]) -> Settings:
    """Return settings with relative paths that exist, even if the command runs elsewhere or the folder has moved.

    Paths in settings are relative to where the first command ran. They are searched in the current folder, then in the
    parents of `folder`; all of them must lie in the same one.

    Args:
        settings: The settings of an index or a run.
        folder: The folder that the settings were read from.
        needed: The settings whose files must exist.

    Raises:
        FileNotFoundError: A needed file is in neither place.

    """
    named = {name: _file_of(getattr(settings, name)) for name in PATHS if getattr(settings, name) is not None}
    absent = {name: file for name, file in named.items() if file is not None and not Path(file).exists()}
    wanted = [name for name in needed if name in absent]
    around = [
        base for base in folder.resolve().parents if all((base / absent[name]).exists() for name in wanted)
    ]
    if wanted and not around:
        name = wanted[0]
        raise FileNotFoundError(
            f"{folder} was built with {absent[name]}, which is neither in {Path.cwd()} nor in a folder above "
            f"{folder.resolve()}. Pass its path with --{name}, or run the command where {folder} was built."
        )
    changes = {
        name: str(around[0] / file) + getattr(settings, name).removeprefix(file)
        for name, file in absent.items()
        if wanted and (around[0] / file).exists()
    }
    return settings.model_copy(update=changes)


def _file_of(text: str) -> str | None:
    """Return the relative path in a setting; None if it is absolute, in the home folder or not a path."""
    place, colon, _ = text.rpartition(":")
    path = place if colon else text
    is_path = (
        path.endswith(".py") or "/" in path if colon else text not in ("auto", *NAMED) and "(" not in text
    )
    return None if not is_path or Path(path).is_absolute() or path.startswith("~") else path


def describe_errors(error: ValidationError) -> str:
    """Describe what is wrong with settings, field by field."""
    known = ", ".join(Settings.model_fields)
    problems = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"][:1])
        if problem["type"] == "extra_forbidden":
            problems.append(f"there is no setting {field!r} (known settings: {known})")
        else:
            meaning = Settings.model_fields[field].description
            message = problem["msg"].removeprefix("Value error, ")
            problems.append(f"{field}: {message}, found {problem['input']!r} ({meaning})")
    return "; ".join(dict.fromkeys(problems)) + "."
