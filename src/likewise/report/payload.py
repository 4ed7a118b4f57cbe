"""The data of a report as one gzipped blob: a JSON header, then arrays at offsets that are multiples of 8."""

import gzip
import json
from typing import Any

import numpy as np

from likewise.report.run_data import Run

MOST_POINTS_AS_SVG = 4000  # more are drawn by WebGL
RANKED = ("label_suspicion", "error", "novelty")  # by which samples are listed


def pack_payload(run: Run) -> bytes:
    """Return everything that the page's scripts read."""
    blob = _Blob()
    manifest = run.manifest
    header: dict[str, Any] = {
        "n": run.n,
        "k": run.indices.shape[1],
        "edges": manifest["edges"],
        "threshold": manifest["options"]["threshold"],
        "classes": manifest["classes"],
        "classSimilarity": manifest.get("class_similarity"),
        "run": manifest["data"],
        "mostPointsAsSvg": MOST_POINTS_AS_SVG,
        "ownColumns": run.own_columns,
        "columns": {
            name: blob.column(values, name in RANKED)
            for name, values in run.columns.items()
            if name != "sample"
        },
        "neighbors": blob.array(run.indices.astype("u4")),
        "similarities": blob.array(np.round((run.similarities.clip(-1, 1) + 1) * 5000).astype("u2")),
        "counts": blob.array(run.counts.astype("u2" if run.n < 2**16 else "u4")),
        "pictures": {
            "samples": blob.array(np.array(list(run.pictures), dtype="u4")),
            "kinds": [picture.kind for picture in run.pictures.values()],
            "ends": blob.array(np.cumsum([len(p.content) for p in run.pictures.values()], dtype="u4")),
            "content": blob.add(b"".join(p.content for p in run.pictures.values())),
        },
    }
    text = json.dumps(header, ensure_ascii=False).encode()
    start = np.array([len(text)], dtype="<u4").tobytes()
    whole = start + text + b"\0" * (-(len(text) + 4) % 8) + blob.joined()
    return gzip.compress(whole, 9, mtime=0)


class _Blob:
    """Arrays one after another, and where each is."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def array(self, values: np.ndarray) -> dict[str, Any]:
        """Return where an array is, as the page reads it."""
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        return {"type": values.dtype.str[1:], **self.add(little.tobytes())}

    def add(self, content: bytes) -> dict[str, Any]:
        """Return where bytes are."""
        where = {"at": self._size, "bytes": len(content)}
        padded = content + b"\0" * (-len(content) % 8)
        self._parts.append(padded)
        self._size += len(padded)
        return where

    def column(self, values: np.ndarray, exact: bool) -> dict[str, Any]:
        """Return where a column is; texts are numbered."""
        kind = values.dtype.kind
        if kind == "f":
            return {**self.array(values.astype("f4") if exact else _short(values)), "kind": kind}
        small = kind in "biu" and (not len(values) or abs(values.astype(object)).max() < 2**31)
        if small:
            return {
                **self.array(values.astype("u1" if kind == "b" else "i4")),
                "kind": "truth" if kind == "b" else "i",
            }
        texts, codes = np.unique(values.astype(str), return_inverse=True)
        return {**self.array(codes.astype("u4")), "kind": "text", "texts": texts.tolist()}

    def joined(self) -> bytes:
        """Return all of it."""
        return b"".join(self._parts)


def _short(values: np.ndarray) -> np.ndarray:
    """Return float32 with 12 bits of fraction, about four digits: half the size when zipped."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = ((bits + np.uint32(1 << 10)) & np.uint32(0xFFFFF800)).view("<f4")
    return np.where(np.isfinite(values), rounded, values).astype("f4")
