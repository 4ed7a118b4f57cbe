// Where is suspicion, novelty or error concentrated? Any column, cut into groups, with what to expect by chance.

const MOST_GROUPS = 30;
const QUANTILES = 5;

function makeSlices(state) {
  const { data } = state;
  const measures = sliceMeasures(data);
  const columns = sliceColumns(data);
  const by = document.getElementById("slice-by");
  const of = document.getElementById("slice-of");
  const place = document.getElementById("slices");
  by.append(...columns.map((name) => element("option", { value: name }, titleOf(data, name))));
  of.append(...measures.map(({ name, title }) => element("option", { value: name }, title)));
  const draw = () => place.replaceChildren(...sliceRows(state, by.value, measures.find(({ name }) => name === of.value)));
  const some = measures.find(({ test }) => Array.from({ length: data.n }, (_, i) => i).some(test)); // not one that counts nothing
  if (some) of.value = some.name;
  for (const field of [by, of]) field.addEventListener("change", draw);
  document.getElementById("slices-found").append(...standouts(data, columns, measures).map(({ text, column, measure }) => {
    const made = button(text, () => {
      [by.value, of.value] = [column, measure];
      draw();
    }, { class: "link" });
    return element("li", {}, made);
  }));
  draw();
}

// What is counted in each slice: shares of samples for which something holds.
function sliceMeasures(data) {
  const { label_issue: flagged, prediction, label, novelty, status, shift, error } = data.columns;
  const top = (column) => {
    const limit = Float32Array.from(column.values).sort()[Math.floor(0.9 * (data.n - 1))];
    return (i) => column.values[i] > limit;
  };
  const isolated = status?.texts.indexOf("isolated");
  return [
    flagged && { name: "label_issue", title: "labels that look wrong", test: (i) => flagged.values[i] === 1 },
    label && prediction && isClass(data, "label") && { name: "mistakes", title: "predictions that differ from the label", test: (i) => prediction.values[i] !== label.values[i] },
    error && { name: "error", title: "among the largest tenth of errors", test: top(error) },
    { name: "novelty", title: "among the most novel tenth", test: top(novelty) },
    shift && { name: "shift", title: "among the largest tenth of prediction gaps", test: top(shift) },
    status && { name: "isolated", title: "samples with few neighbors", test: (i) => status.values[i] === isolated },
  ].filter(Boolean);
}

function sliceColumns(data) {
  const usable = (name) => data.columns[name].kind !== "text" || data.columns[name].texts.length <= data.n / 2;
  const found = [...data.ownColumns.filter(usable), ...["label", "prediction", "log_likelihood", "status", "suspicious_class"].filter((name) => data.columns[name])];
  return found.length ? found : ["density"]; // targets that are vectors are no column
}

function slicesOf(data, name) {
  const { kind, values, texts } = data.columns[name];
  const groups = new Map();
  const add = (key, title, i) => {
    if (!groups.has(key)) groups.set(key, { title, samples: [] });
    groups.get(key).samples.push(i);
  };
  if (kind === "f" || (kind === "i" && !isClass(data, name) && new Set(values).size > 12)) {
    const sorted = Float64Array.from(values).sort();
    const edges = Array.from({ length: QUANTILES - 1 }, (_, q) => sorted[Math.floor(((q + 1) * data.n) / QUANTILES)]);
    const title = (q) => (q === 0 ? `< ${rounded(edges[0])}` : q === QUANTILES - 1 ? `≥ ${rounded(edges[q - 1])}` : `${rounded(edges[q - 1])} to ${rounded(edges[q])}`);
    for (let i = 0; i < data.n; i++) {
      const q = edges.filter((edge) => values[i] >= edge).length;
      add(q, title(q), i);
    }
  } else {
    for (let i = 0; i < data.n; i++) add(values[i], shown(data, name, i), i);
  }
  return [...groups].sort((a, b) => a[0] - b[0]).map(([, group]) => group);
}

function measured(data, name, test) {
  return slicesOf(data, name).map((slice) => {
    const hits = slice.samples.filter(test);
    return { ...slice, hits, share: hits.length / slice.samples.length, interval: wilson(hits.length, slice.samples.length) };
  });
}

// Slices whose share is clearly above that of all samples, the largest excess first.
function standouts(data, columns, measures) {
  const found = [];
  for (const { name: measure, title, test } of measures) {
    const all = Array.from({ length: data.n }, (_, i) => i).filter(test).length / data.n;
    for (const column of columns) {
      if (column === measure || column === "status") continue; // that neighbors disagree says the same of labels
      const slices = measured(data, column, test);
      if (slices.length < 2 || slices.length > 200) continue;
      for (const { title: slice, share, interval, hits, samples } of slices) {
        // Many slices are tried: the interval must stay clear of what all samples have by half.
        if (hits.length >= 5 && interval[0] > 1.5 * all) found.push({ excess: hits.length - all * samples.length, column, measure, text: `${titleOf(data, column)} ${slice}: ${percent(share)} are ${title} (${percent(all)} of all samples)` });
      }
    }
  }
  return found.sort((a, b) => b.excess - a.excess).slice(0, 4);
}

function sliceRows(state, column, measure) {
  const { data } = state;
  const slices = measured(data, column, measure.test).sort((a, b) => b.share - a.share);
  const all = Array.from({ length: data.n }, (_, i) => i).filter(measure.test).length / data.n;
  const most = Math.max(all, ...slices.slice(0, MOST_GROUPS).map(({ interval, samples }) => (samples.length >= 10 ? interval[1] : 0)), 1e-9);
  const at = (share) => `${Math.min(100, (100 * share) / most).toFixed(2)}%`;
  const rows = slices.slice(0, MOST_GROUPS).map(({ title, samples, hits, share, interval }) =>
    element(
      "button",
      { type: "button", class: "slice", "data-share": share.toFixed(4), "data-slice": title, title: `95 % interval ${percent(interval[0])} to ${percent(interval[1])}`, onclick: () => { state.select(hits.length ? hits : samples, `${hits.length ? measure.title : "samples"} with ${titleOf(data, column)} ${title}`); goToSamples(); } },
      element("span", { class: "slice-name" }, title),
      element("span", { class: "slice-bar" }, element("span", { class: "fill", style: `width: ${at(share)}` }), element("span", { class: "range", style: `left: ${at(interval[0])}; width: calc(${at(interval[1])} - ${at(interval[0])})` }), element("span", { class: "all", style: `left: ${at(all)}` })),
      element("span", { class: "slice-count" }, `${percent(share)} · ${hits.length.toLocaleString("en")} of ${samples.length.toLocaleString("en")}`),
    ),
  );
  if (slices.length > MOST_GROUPS) rows.push(element("p", {}, `and ${slices.length - MOST_GROUPS} more`));
  const axis = element("div", { class: "slice-axis quiet" }, element("span"), element("span", { class: "ticks" }, ...[0, 0.5, 1].map((part) => element("span", {}, percent(part * most)))), element("span"));
  return [element("p", { class: "quiet" }, `Vertical line: all samples, ${percent(all)}. Thin bars: 95 % intervals.`), axis, ...rows];
}
