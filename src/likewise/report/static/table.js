// The table: every sample, sorted and filtered; it follows the selection and the threshold.

const MEANINGS = {
  __proto__: null, // a column may be called constructor
  sample: "its number in the data set",
  label: "the label given",
  prediction: "what the network says",
  local_density: "how many samples are like it, locally: the sum of its positive similarities to the fourth power",
  density: "mean similarity to all samples (N_S / N): large is ordinary, small is rare",
  hard_neighbors: "how many samples are at least as similar as the threshold, itself among them",
  novelty: "1 less the mean similarity of the ten most similar samples: large is unlike all others",
  uncertainty: "how freely its prediction can move without moving others",
  shift: "how far its prediction is from that of its neighbors",
  error: "distance of the prediction from the label",
  agreement: "share of its neighbors' votes for the predicted class",
  status: "ordinary, contested (neighbors vote for another class) or isolated (too few neighbors)",
  label_suspicion: "how much its neighbors and the network speak against its label: 0 not at all, 1 all for one other; with a record of training the mean of its rank and that of −margin",
  suggested_label: "the label that they speak for",
  label_issue: "neighbors vote for another label, and it is more likely wrong than right",
  chance_wrong: "estimated chance that the label is wrong, from the votes of its neighbors",
  margin: "logit of the label less the largest other logit, the mean over training: low or negative speaks against the label",
};
const HIDDEN = new Set(["map_x", "map_y"]);

function makeTable(state) {
  const { data } = state;
  const rows = Array.from({ length: data.n }, (_, sample) => rowOf(data, sample));
  const sort = rankedBy(data);
  const table = new Tabulator("#table", {
    data: rows,
    index: "sample",
    nestedFieldSeparator: false,
    height: "520px",
    rowHeight: 40,
    layout: "fitDataFill",
    columns: columnsOf(state),
    initialSort: [{ column: sort, dir: "desc" }],
    placeholder: "No sample is left: change the filters or the selection.",
    columnDefaults: { headerSortStartingDir: "desc", resizable: false, headerTooltip: true },
  });
  table.on("rowClick", (_, row) => state.open(row.getData().sample));
  let ready = false;
  const follow = () => {
    if (!ready) return;
    const chosen = state.selected && new Set(state.selected);
    if (chosen) table.setFilter((row) => chosen.has(row.sample));
    else table.clearFilter();
  };
  table.on("tableBuilt", () => {
    ready = true;
    follow();
    document.getElementById("table").dataset.ready = "yes";
  });
  table.on("dataFiltered", (_, left) => {
    document.getElementById("table").dataset.rows = left.length;
  });
  state.on("selection", follow);
  state.on("threshold", () => {
    rows.forEach((row) => (row.hard_neighbors = countFrom(data, row.sample, state.threshold)));
    table.replaceData(rows);
  });
  return table;
}

function rowOf(data, sample) {
  const row = { __proto__: null, sample };
  for (const [name, column] of Object.entries(data.columns)) {
    if (HIDDEN.has(name)) continue;
    const asText = column.kind === "text" || column.kind === "truth" || (CLASS_COLUMNS.has(name) && column.kind !== "f");
    row[name] = asText ? shown(data, name, sample) : column.values[sample];
  }
  return row;
}

function columnsOf(state) {
  const { data } = state;
  const seen = { title: "", field: "picture", headerSort: false, width: data.pictures.wide ? 240 : 56, formatter: (cell) => picture(data, cell.getData().sample) };
  const number = { title: "sample", field: "sample", sorter: "number", width: 90, headerFilter: "input", headerFilterFunc: "=", headerTooltip: MEANINGS.sample };
  const rest = Object.entries(data.columns).filter(([name]) => !HIDDEN.has(name)).map(([name, column]) => {
    const title = name.replaceAll("_", " ");
    const common = { title: plain(title), field: name, headerTooltip: plain(MEANINGS[name] ?? title) };
    if (column.kind === "text" || column.kind === "truth" || (CLASS_COLUMNS.has(name) && column.kind !== "f")) {
      const few = data.classes && CLASS_COLUMNS.has(name) ? data.classes : column.kind === "truth" ? ["yes", "no"] : column.texts?.length <= 20 ? column.texts : null;
      const values = few?.map((value) => ({ label: plain(value), value })); // labels are set as HTML
      const list = few && { headerFilter: "list", headerFilterParams: { values, clearable: true }, headerFilterFunc: "=" };
      return { ...common, sorter: "string", formatter: "plaintext", ...(list || { headerFilter: "input" }) };
    }
    return { ...common, sorter: "number", hozAlign: "right", headerFilter: "input", headerFilterFunc: ">=", headerFilterPlaceholder: "≥", formatter: (cell) => column.kind === "f" ? rounded(cell.getValue()) : String(cell.getValue()) };
  });
  return [seen, number, ...rest];
}
