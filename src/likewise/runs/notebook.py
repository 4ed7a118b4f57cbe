"""A run in a notebook: the map with a lasso and the review queue, whose selection and decisions are Python objects."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
import traitlets

from likewise.runs.review import Decision, ReviewQueue, static_html, write_decisions

if TYPE_CHECKING:
    import pandas

    from likewise.runs.result import Analysis

COMPONENTS = Path(__file__).parents[1] / "components"


def _source(*names: str) -> str:
    return "\n".join((COMPONENTS / name).read_text(encoding="utf-8") for name in names)


class ReviewWidget(anywidget.AnyWidget):
    """The map and the review queue of a run, as `Analysis.show` returns them.

    Where widgets do not run, the most suspicious samples are shown as plain HTML.

    Args:
        run: The run.

    """

    _esm = _source("keys.js", "components.js", "widget.js")
    _css = _source("components.css", "widget.css")

    selected = traitlets.List(
        traitlets.Int(), help="The numbers of the samples that are circled on the map."
    ).tag(sync=True)
    _decided = traitlets.Dict(help="What was decided, by the number of the sample as text.").tag(sync=True)
    _x = traitlets.Bytes().tag(sync=True)
    _y = traitlets.Bytes().tag(sync=True)
    _groups = traitlets.Bytes().tag(sync=True)
    _has_groups = traitlets.Bool().tag(sync=True)
    _classes = traitlets.List(traitlets.Unicode(), allow_none=True).tag(sync=True)
    _total = traitlets.Int().tag(sync=True)
    _flagged = traitlets.Int().tag(sync=True)

    def __init__(self, run: "Analysis") -> None:
        self.run, self._queue = run, ReviewQueue(run)
        table, classes = run.table, run.manifest.get("classes")
        group = next(
            (name for name in ("label", "prediction") if name in table and classes is not None), None
        )
        groups = np.zeros(0, dtype=np.int32) if group is None else table[group].to_numpy().astype(np.int32)
        super().__init__(
            _x=table["map_x"].to_numpy().astype("<f4").tobytes(),
            _y=table["map_y"].to_numpy().astype("<f4").tobytes(),
            _groups=groups.astype("<i4").tobytes(),
            _has_groups=group is not None,
            _classes=None if classes is None else [self._queue.class_name(i) for i in range(len(classes))],
            _total=len(self._queue) if "label_issue" in table else 0,
            _flagged=self._queue.flagged,
        )
        self.on_msg(self._answer)

    @property
    def decisions(self) -> list[Decision]:
        """What was decided so far, in the order of samples: for `likewise.apply_decisions`."""
        entries = [{"sample": int(sample), **decision} for sample, decision in self._decided.items()]
        found = {"run": self.run.manifest["data"], "decisions": entries}
        return self.run.decision_reader.parse(found, "The widget")

    @property
    def selected_table(self) -> "pandas.DataFrame":
        """The rows of the run's table that are circled on the map."""
        return self.run.table.loc[self.selected]

    def save(self, path: str | Path) -> None:
        """Write the decisions to a file, as the report's review downloads them."""
        write_decisions(Path(path), self.decisions, self.run.manifest)

    def _answer(self, _: Any, content: Any, __: Any) -> None:
        """Send entries of the queue that the page asks for."""
        if isinstance(content, Mapping) and content.get("kind") == "load":
            start, count = max(0, int(content["start"])), min(100, int(content["count"]))
            self.send({"id": content["id"], "entries": self._queue.entries(start, count)})

    def _repr_mimebundle_(self, **options: Any) -> Any:
        found = super()._repr_mimebundle_(**options)
        data = found[0] if isinstance(found, tuple) else found
        if data is not None:
            data["text/html"] = static_html(self.run)
        return found
