"""The options of a run, declared once: for commands, for Python, and for a file that starts it again."""

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
    """Return names written with commas as a tuple; anything else as it is."""
    return (
        tuple(part.strip() for part in given.split(",") if part.strip()) if isinstance(given, str) else given
    )


Names = Annotated[tuple[str, ...], BeforeValidator(_split_names)]


class Settings(BaseModel):
    """Everything that a run is asked for: the one declaration of options.

    The command line takes names, defaults and help from here (`likewise.cli.options`), settings.toml is a dump of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        description="The model: `package.module:object` or `path/to/file.py:object`, a module or a function that makes "
        "one; a folder of save_pretrained (transformers, peft); or the settings.toml of a run, to start it again."
    )
    data: str = Field(
        description="The data: a folder of classes with images, a .csv, .tsv, .parquet, .jsonl or .npz file, or an "
        "import string."
    )
    weights: str | None = Field(
        default=None, description="A state dict: .safetensors, or what torch.save wrote."
    )
    label: str | None = Field(default=None, description="The column, or array, of labels.")
    text_column: str | None = Field(
        default=None,
        description="The column of texts, for the tokenizer of the model's folder or --prepare; with a comma, two: "
        "pairs of sentences, or prompt and completion.",
    )
    columns: Names | None = Field(
        default=None, description="The columns that are inputs, with commas; else all numeric."
    )
    image_size: int | None = Field(
        default=None, ge=1, description="Resize images to a square of so many pixels."
    )
    gray: bool = Field(default=False, description="Read images as gray, one channel.")
    prepare: str | None = Field(
        default=None, description="Import string of a function: one raw sample → the model's input."
    )
    task: Literal["causal-lm", "sequence-classification"] | None = Field(
        default=None, description="What the model in a folder does; else its configuration says."
    )
    max_length: int | None = Field(
        default=None,
        ge=2,
        description="Tokens that are read of a text; else what the model reads, up to 1,024.",
    )
    base_model: str | None = Field(
        default=None,
        description="The folder of the model that a peft adapter is for, if it is not where it was.",
    )
    allow_pickle: bool = Field(
        default=False, description="Read weights of a folder that torch.save wrote (tensors only)."
    )
    show: str | None = Field(
        default=None,
        description="Import string of a function: sample number → what the report shows (image, text, dict, array).",
    )
    show_columns: Names | None = Field(
        default=None,
        description="Columns to show of a row beside inputs and label, with commas; no others get into the report.",
    )
    excerpt_length: int = Field(
        default=EXCERPT, ge=1, description="Characters that the report shows of a text."
    )
    passages: int | None = Field(
        default=None,
        ge=0,
        description="Of a causal language model: for how many texts, the most novel first, the report marks on which "
        "passages of three neighbors their similarity rests, at about eight training steps a neighbor; else one in "
        "200, 8 to 32. 0 for none.",
    )
    follow_links: bool = Field(
        default=False, description="Also read what links in a folder of images lead to outside of it."
    )
    classes: Names | None = Field(default=None, description="Names of the classes, in order, with commas.")
    limit: int | None = Field(default=None, ge=1, description="Only so many samples.")
    readout: str = Field(
        default="auto",
        description=f"Whose gradients are compared: auto, projected_outputs(8), {', '.join(NAMED)}, or an import "
        "string.",
    )
    parameters: Names | None = Field(
        default=None,
        description="Only these parameters, with commas: `layer4.*,fc.*`; or `adapters`, of peft.",
    )
    neighbors: int = Field(default=10, ge=1, description="How many neighbors to keep of each sample.")
    threshold: float = Field(
        default=0.5,
        ge=-1,
        le=1,
        description="Samples at least so similar count as near; a multiple of 0.05.",
    )
    sketch: Literal["auto", "never"] | int = Field(
        default="auto",
        description="auto, never, or numbers per sample: random projections of gradients where pairs are many.",
    )
    exact: bool = Field(
        default=False,
        description="Compare gradients of all outputs, all pairs, without sketches: often a hundred times the cost.",
    )
    layout: Literal["neighbors", "pca", "umap"] = Field(
        default="neighbors",
        description="How the map is drawn: from neighbors, by the two leading directions (pca), or by umap (an extra).",
    )
    watch: str | None = Field(
        default=None,
        description="The record of the training run, as likewise.Watch.save wrote it: ranks labels better.",
    )
    reheat: bool = Field(
        default=False,
        description="Judge labels also by copies of the network that are trained on, if it has memorized them.",
    )
    crossval: str | None = Field(
        default=None,
        description="The folder of likewise crossval: judge labels also by networks that have not seen them.",
    )
    no_index: bool = Field(
        default=False, description="Do not keep the sketches of a run as an index for likewise ask."
    )
    max_memory: ByteSize | None = Field(
        default=None,
        ge=1,
        description="For gradients and pairs, beside the model, such as 4GB; half of what is free if not given.",
    )
    device: str = Field(default="cpu", description="Where the model runs: cpu, cuda, cuda:1, mps.")

    def naming_columns(self, columns: Sequence[str] | None) -> "Settings":
        """Return the settings with the columns that are inputs, if they were not named: new rows are read by name."""
        if columns is None or self.columns is not None:
            return self
        return self.model_copy(update={"columns": tuple(columns)})

    def text(self, command: str = "analyze") -> str:
        """Return the settings of a command as TOML; what is not set is left out.

        Paths inside the current folder are written relative to it, those inside the home folder with a ~:
        the file can be given away without telling where someone's files are.
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
    """Return a path, or an import string with one, without the names of folders that are not its own."""
    path = Path(text)
    if not path.is_absolute():
        return text
    for folder, prefix in ((Path.cwd(), ""), (Path("~").expanduser(), "~/")):
        if path != folder and path.is_relative_to(folder):
            return prefix + path.relative_to(folder).as_posix()
    return text


def read_settings(path: str | Path) -> Settings:
    """Return the settings in a TOML file, or say which of them is wrong."""
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
            f"{path} is of a run that was started from Python, with a model or data that no text names: "
            "start it again from there, or write import strings for model and data into the file."
        )
    return found


def locate_paths(settings: Settings, folder: Path, needed: Sequence[str]) -> Settings:
    """Return settings whose relative paths lead to files, wherever the command is given and the folder lies.

    Paths are as they were seen from where the first command was given. They are looked for in the current folder, then
    in the folders around `folder`, all of them in the same one.

    Args:
        settings: Of an index or a run.
        folder: In which they were found.
        needed: The settings whose files must be there.

    Raises:
        FileNotFoundError: They are neither here nor there.

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
            f"{folder} was built with {absent[name]}, which is neither in {Path.cwd()} nor around {folder.resolve()}: "
            f"say where it is by --{name}, or give the command in the folder where it was built."
        )
    changes = {
        name: str(around[0] / file) + getattr(settings, name).removeprefix(file)
        for name, file in absent.items()
        if wanted and (around[0] / file).exists()
    }
    return settings.model_copy(update=changes)


def _file_of(text: str) -> str | None:
    """Return the relative path in a setting, None where it is absolute, in the home folder or no path at all."""
    place, colon, _ = text.rpartition(":")
    path = place if colon else text
    is_path = (
        path.endswith(".py") or "/" in path if colon else text not in ("auto", *NAMED) and "(" not in text
    )
    return None if not is_path or Path(path).is_absolute() or path.startswith("~") else path


def describe_errors(error: ValidationError) -> str:
    """Return what is wrong with settings, field by field."""
    known = ", ".join(Settings.model_fields)
    problems = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"][:1])
        if problem["type"] == "extra_forbidden":
            problems.append(f"there is no setting {field!r} (there are: {known})")
        else:
            meaning = Settings.model_fields[field].description
            message = problem["msg"].removeprefix("Value error, ")
            problems.append(f"{field}: {message}, found {problem['input']!r} ({meaning})")
    return "; ".join(dict.fromkeys(problems)) + "."
