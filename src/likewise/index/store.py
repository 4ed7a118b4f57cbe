"""The files of an index: shards of sketches that are only ever added, and a manifest that names them.

    manifest.json            what the index is of: model, readout, parameters, precision, projection, data; checksums
    shard-START.safetensors  whitened sketches of consecutive rows, less an origin; labels, model outputs, features
    pictures-START.safetensors  thumbnails or excerpts, and names of these rows
    origins-HASH.safetensors the origins, one for each data set that was added; errors in standard errors
    summary-HASH.safetensors mean sketch; mean similarity and distance to the mean of every row; novelty of some
    removed-HASH.safetensors rows that were removed
    gradient-HASH.safetensors  the sum of all whitened gradients, once an exact centered answer was asked for
    settings.toml            the options of `likewise index`
    shard-START.json         while a build runs: the note that a shard is complete

Sketches are stored minus an origin, a vector near their mean: otherwise, what all samples share would use up the digits
of float16 or int8. Files are written atomically (temporary name, flushed, renamed), then the manifest that names them;
files that no manifest or note names are ignored. No pickle is written or read.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from likewise import files
from likewise.locks import CREATED_NAME, LOCK_NAME
from likewise.manifest import (
    DIFFERENT,
    MISSING,
    NAME,
    DamagedIndexError,
    Integrity,
    Kind,
    read_manifest,
    write_manifest,
)

INDEX = Kind(
    "index",
    1,
    DamagedIndexError,
    "Build it again in a new folder, by likewise index or likewise.build_index.",
)
DTYPES = ("float16", "int8", "float32")
SETTINGS = "settings.toml"
PREFIXES = ("shard-", "pictures-", "origins-", "summary-", "removed-", "gradient-")  # of files that are ours
BLOCK = 1024  # rows that are converted to float32 at a time: a few megabytes, which caches hold
_NOTE_ENDING = ',\n "sha256 of this note": "{}"\n}\n'


class Shard(NamedTuple):
    """A file of consecutive rows."""

    start: int
    stop: int
    source: int  # which data set: its origin
    sha256: str
    pictures: str | None  # checksum of the file of pictures
    data: str  # fingerprint of the samples

    @property
    def name(self) -> str:
        """The file of sketches, labels and outputs."""
        return f"shard-{self.start:012}.safetensors"

    @property
    def pictures_name(self) -> str:
        """The file of pictures and names."""
        return f"pictures-{self.start:012}.safetensors"

    @property
    def files(self) -> dict[str, str]:
        """The checksums of its files, by name."""
        found = {self.name: self.sha256}
        return found if self.pictures is None else {**found, self.pictures_name: self.pictures}


class OutdatedIndexError(RuntimeError):
    """Rows were added or removed by another process, or another object, since the index was opened.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"Rows were added to the index in {path}, or removed, since it was opened here: open it again, by "
            "likewise.Index(folder, ...)."
        )
        self.path = path


class Rows:
    """The content of a shard, memory-mapped, so that only what is used is read.

    Attributes:
        sketches: (r, width).
        scales: (r,) for int8, else None.

    """

    def __init__(self, file: "_MappedFile") -> None:
        self._file = file
        sketches, self.scales = file.read("sketches", "scales")
        if sketches is None:
            raise DamagedIndexError(file.folder, {file.name: "it has no sketches"})
        self.sketches: Tensor = sketches

    @cached_property
    def dead(self) -> Tensor:
        """The places of rows with a zero gradient."""
        (found,) = self._file.read("dead")
        return torch.zeros(0, dtype=torch.int64) if found is None else found

    @cached_property
    def labels(self) -> Tensor | None:
        """The labels, (r, ...)."""
        return self._file.read("labels")[0]

    @cached_property
    def outputs(self) -> Tensor | None:
        """The model's outputs, (r, c)."""
        return self._file.read("outputs")[0]

    @cached_property
    def features(self) -> Tensor | None:
        """Normalized inputs of the last layer, (r, q), float16."""
        return self._file.read("features")[0]

    @cached_property
    def feature_lengths(self) -> Tensor | None:
        """Lengths of the inputs of the last layer, (r,)."""
        return self._file.read("feature_lengths")[0]

    def decode(self, where: slice, into: Tensor) -> Tensor:
        """Return sketches minus their origin as float32, in the first rows of a buffer."""
        part = self.sketches[where]
        found = into[: len(part)].copy_(part)
        return found if self.scales is None else found.mul_(self.scales[where, None])

    def blocks(self, device: torch.device | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows, decoded, a block at a time; each is overwritten by the next.

        A GPU gets them as stored, and decodes them.
        """
        n, width = self.sketches.shape
        if device is not None and device.type != "cpu":
            for start in range(0, n, BLOCK):
                where = slice(start, min(start + BLOCK, n))
                found = self.sketches[where].to(device).float()
                yield where, found if self.scales is None else found.mul_(self.scales[where, None].to(device))
            return
        buffer = torch.empty(
            min(n, BLOCK), width
        )  # new memory for each block would cost more than the products
        for start in range(0, n, BLOCK):
            where = slice(start, min(start + BLOCK, n))
            yield where, self.decode(where, buffer)


def encode(sketches: Tensor, dtype: str) -> dict[str, Tensor]:
    """Return sketches (r, width) in the form that is stored: float16, float32, or int8 with a scale for each row."""
    if dtype != "int8":
        return {"sketches": sketches.to(getattr(torch, dtype)).contiguous()}
    largest = sketches.abs().amax(1).float()
    scales = torch.where(largest > 0, largest / 127, 1)
    steps = (sketches / scales[:, None]).round_().clamp_(-127, 127)
    return {"sketches": steps.to(torch.int8).contiguous(), "scales": scales}


class Sources(NamedTuple):
    """What is kept of each data set of an index."""

    origins: Tensor  # (sources, width) what is subtracted from the sketches of its rows
    factors: Tensor  # (sources, 2) errors of centered and of plain similarities, in standard errors


def join_sources(sources: Sequence[Sources]) -> dict[str, Tensor]:
    """Return data sets, one after another, as the tensors of a file."""
    return {
        name: torch.cat(parts)
        for name, parts in zip(Sources._fields, zip(*sources, strict=True), strict=True)
    }


def read_sources(folder: "IndexFolder") -> Sources:
    """Return what is stored of each data set; error factors are 1 if the index was built before there were any."""
    found = folder.read_tensors("origins")
    return Sources(found["origins"], found.get("factors", torch.ones(len(found["origins"]), 2)))


class IndexFolder:
    """The files of an index; `state` is what its manifest says.

    Args:
        path: The folder.
        state: The manifest's content.

    """

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self.path, self.state = path, state

    @classmethod
    def open(cls, path: Path, *, verify: bool = True) -> "IndexFolder":
        """Return a finished index, its files checked.

        Args:
            path: The folder.
            verify: Compare all checksums; else only that the files are there.

        Raises:
            FileNotFoundError: There is no index.
            ValueError: It is unfinished, or of another version of likewise.
            DamagedIndexError: Files are missing or not as they were written.

        """
        found = cls(path, read_manifest(path, INDEX))
        if not found.state["finished"]:
            raise ValueError(
                f"The index in {path} is not finished: repeat the command or call that started it to resume it."
            )
        damaged = found.find_damage(verify=verify)
        if damaged:
            raise DamagedIndexError(path, damaged)
        return found

    @property
    def shards(self) -> list[Shard]:
        """The shards in order of their rows."""
        return [Shard(**entry) for entry in self.state["shards"]]

    @property
    def rows(self) -> int:
        """How many rows were ever added."""
        return sum(source["samples"] for source in self.state["data"])

    @property
    def files(self) -> dict[str, str]:
        """The checksums of all files, by name."""
        named = {name: digest for shard in self.shards for name, digest in shard.files.items()}
        return {**named, **{file["name"]: file["sha256"] for file in self.state["files"].values()}}

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes of all files, and of those of pictures."""
        sizes = {name: (self.path / name).stat().st_size for name in (NAME, *self.files)}
        pictures = sum(size for name, size in sizes.items() if name.startswith("pictures-"))
        return {"all": sum(sizes.values()), "pictures": pictures}

    def find_damage(self, *, verify: bool = True) -> dict[str, str]:
        """Return what is wrong with each damaged file, by its name."""
        damaged = {}
        for name, expected in self.files.items():
            if not (self.path / name).exists():
                damaged[name] = MISSING
            elif verify and files.checksum(self.path / name) != expected:
                damaged[name] = DIFFERENT
        return damaged

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one of the named files: "origins", "summary" or "removed"."""
        entry = self.state["files"].get(name)
        if entry is None:
            return {}
        try:
            return _map_tensors(self.path, entry["name"])
        except DamagedIndexError:
            if self.is_outdated():
                raise OutdatedIndexError(self.path) from None
            raise

    def is_outdated(self) -> bool:
        """Whether the folder has another manifest: rows were added or removed since it was read."""
        return read_manifest(self.path, INDEX) != self.state

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a named file next to the old one, for the next manifest; its name contains the checksum."""
        content = _serialize(tensors)
        digest = hashlib.sha256(content).hexdigest()
        file = f"{name}-{digest[:12]}.safetensors"
        _write(self.path / file, content)
        self.state["files"][name] = {"name": file, "sha256": digest}

    def write_settings(self, text: str) -> None:
        """Write the options of the command."""
        self.state["files"]["settings"] = {
            "name": SETTINGS,
            "sha256": files.write_text(self.path / SETTINGS, text),
        }

    def write_shard(
        self, start: int, rows: Mapping[str, Tensor], pictures: Mapping[str, Tensor] | None
    ) -> tuple[str, str | None]:
        """Write the files of a shard, and return their checksums."""
        shard = Shard(start, start, 0, "", None, "")
        digest = _write(self.path / shard.name, _serialize(rows))
        shown = None if pictures is None else _write(self.path / shard.pictures_name, _serialize(pictures))
        return digest, shown

    def read_rows(self, shard: Shard) -> Rows:
        """Return the content of a shard, mapped."""
        return Rows(_MappedFile(self.path, shard.name))

    def read_pictures(self, shard: Shard) -> dict[str, Tensor]:
        """Return the pictures of a shard, mapped; none if none were stored."""
        return {} if shard.pictures is None else _map_tensors(self.path, shard.pictures_name)

    def note_shard(self, shard: Shard, of: str) -> None:
        """Note that a shard is complete; `of` is the build that it belongs to."""
        body = json.dumps({**shard._asdict(), "of": of}, indent=1).removesuffix("\n}")
        files.write_text(self._note_path(shard.start), files.seal(body, _NOTE_ENDING))

    def noted_shards(self, of: str) -> list[Shard]:
        """Return the complete shards of a build that is not finished, files and notes intact."""
        found = []
        for path in sorted(self.path.glob("shard-*.json")):
            content = path.read_bytes()
            if not files.is_sealed(content, _NOTE_ENDING):
                continue
            fields = json.loads(content)
            if fields["of"] != of:
                continue
            shard = Shard(**{name: fields[name] for name in Shard._fields})
            if self.is_intact(shard):
                found.append(shard)
        return found

    def is_intact(self, shard: Shard) -> bool:
        """Whether the files of a shard exist and are unchanged."""
        return all(
            (self.path / name).exists() and files.checksum(self.path / name) == digest
            for name, digest in shard.files.items()
        )

    def save(self) -> None:
        """Write the manifest, and remove what it no longer names."""
        write_manifest(self.path, self.state)
        if self.state["finished"]:
            self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        kept = {NAME, LOCK_NAME, CREATED_NAME, *self.files}
        for path in self.path.iterdir():
            own = path.name.startswith(PREFIXES)
            if own and path.name not in kept and path.is_file():
                path.unlink()

    def _note_path(self, start: int) -> Path:
        return self.path / f"shard-{start:012}.json"


def check_index(path: Path) -> Integrity:
    """Return which files of an index are missing or have changed.

    Raises:
        FileNotFoundError: There is no index in the folder.
        ValueError: It is something else, or belongs to another version of likewise.

    """
    try:
        folder = IndexFolder(path, read_manifest(path, INDEX))
    except DamagedIndexError as error:
        return Integrity(False, 1, (path / NAME).stat().st_size, error.parts)
    there = [path / name for name in (NAME, *folder.files) if (path / name).exists()]
    sizes = sum(file.stat().st_size for file in there)
    return Integrity(folder.state["finished"], len(there), sizes, folder.find_damage())


def refuse_foreign(path: Path) -> None:
    """Raise, before anything is written, if a folder without a manifest holds something other than an index."""
    if not (path / NAME).exists():
        allowed = (*PREFIXES, LOCK_NAME, CREATED_NAME, SETTINGS)
        foreign = [
            p.name for p in path.iterdir() if not p.name.startswith(allowed) and not files.is_temporary(p)
        ]
        if foreign:
            raise ValueError(
                f"{path} holds something other than an index ({', '.join(sorted(foreign)[:3])}): choose another folder."
            )


def refuse_other_classes(what: str, there: Sequence[str] | None, here: Sequence[str] | None) -> None:
    """Raise if class numbers have other names than in an index: labels, and so the data, would seem to differ."""
    if list(there or ()) == list(here or ()):
        return
    names = [", ".join(known[:10]) if known else "no names" for known in (there, here)]
    differs = "the classes in another order" if sorted(there or ()) == sorted(here or ()) else "other classes"
    raise ValueError(
        f"{what} has {differs} (there {names[0]}; here {names[1]}), "
        "so class numbers would mean different things: pass the same classes=[...], or --classes, or choose another "
        "folder."
    )


def remove_temporary(path: Path) -> None:
    """Remove temporary files of writers that were killed."""
    for inner in path.iterdir():
        if files.is_temporary(inner) and inner.is_file():
            inner.unlink()


def smallest_integers(values: Tensor) -> Tensor:
    """Return integers in the smallest type that holds them; other values unchanged."""
    if values.is_floating_point() or values.dtype == torch.bool or not values.numel():
        return values
    low, high = int(values.min()), int(values.max())
    for dtype in (torch.uint8, torch.int16, torch.int32):
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return values.to(dtype)
    return values


def _write(path: Path, content: bytes) -> str:
    return files.write_atomically(path, lambda file: file.write(content), len(content))


def _serialize(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: value.contiguous() for name, value in tensors.items()})


class _MappedFile(NamedTuple):
    """A file of tensors."""

    folder: Path
    name: str

    def read(self, *names: str) -> list[Tensor | None]:
        """Return some of its tensors, mapped; None for one that it does not have."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.folder / self.name, framework="pt") as file:
                there = set(file.keys())
                return [file.get_tensor(name) if name in there else None for name in names]
        except (SafetensorError, FileNotFoundError) as error:
            raise DamagedIndexError(self.folder, {self.name: str(error)}) from error


def _map_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / name, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, FileNotFoundError) as error:
        raise DamagedIndexError(folder, {name: str(error)}) from error
