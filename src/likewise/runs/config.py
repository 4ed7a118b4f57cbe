"""What a run was asked for, in a file that starts it again."""

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
)  # paths, or import strings with one


class Settings(BaseModel):
    """Everything that `likewise analyze` was told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    data: str
    weights: str | None = None
    label: str | None = None
    text_column: str | None = None
    columns: tuple[str, ...] | None = None
    image_size: int | None = Field(default=None, ge=1)
    gray: bool = False
    prepare: str | None = None
    show: str | None = None
    show_columns: tuple[str, ...] | None = None
    excerpt_length: int = Field(default=EXCERPT, ge=1)
    follow_links: bool = False
    classes: tuple[str, ...] | None = None
    limit: int | None = Field(default=None, ge=1)
    readout: str = "all_outputs"  # a name in likewise.readouts.NAMED, or an import string
    parameters: tuple[str, ...] | None = None
    neighbors: int = Field(default=10, ge=1)
    threshold: float = Field(default=0.5, ge=-1, le=1)
    sketch: Literal["auto", "never"] | int = "auto"
    layout: Literal["pca", "umap"] = "pca"
    watch: str | None = None
    max_memory: int = Field(default=2**31, ge=1)
    device: str = "cpu"

    def text(self) -> str:
        """Return the settings as TOML; what is not set is left out.

        Paths inside the current folder are written relative to it, those inside the home folder with a ~:
        the file can be given away without telling where someone's files are.
        """
        import tomlkit

        known = {name: value for name, value in self.model_dump(mode="json").items() if value is not None}
        known |= {name: _portable(known[name]) for name in PATHS if name in known}
        replays = "" if self.model == GIVEN_IN_PYTHON else " It starts the same run again: likewise analyze"
        document = tomlkit.document()
        document.add(
            tomlkit.comment(
                f"What this run was asked for.{replays} THIS_FILE"
                if replays
                else "What this run was asked for, by likewise.analyze in Python."
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
        raise ValueError(f"{path}: {told(error)}") from error
    if GIVEN_IN_PYTHON in (found.model, found.data):
        raise ValueError(
            f"{path} is of a run that was started from Python, with a model or data that no text names: "
            "start it again from there, or write import strings for model and data into the file."
        )
    return found


def told(error: ValidationError) -> str:
    """Return what is wrong with settings, field by field."""
    known = ", ".join(Settings.model_fields)
    told = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"][:1])
        if problem["type"] == "extra_forbidden":
            told.append(f"there is no setting {field!r} (there are: {known})")
        else:
            told.append(
                f"{field}: {problem['msg'].removeprefix('Value error, ')}, found {problem['input']!r}"
            )
    return "; ".join(told) + "."
