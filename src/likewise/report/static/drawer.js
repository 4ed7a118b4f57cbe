// One sample: what it is, whether its prediction can be trusted, whom it is like, how similar everyone is to it.

function makeDrawer(state) {
  const drawer = document.getElementById("drawer");
  let back = null;
  const close = () => state.open(null);
  const draw = () => {
    if (state.sample == null) {
      drawer.hidden = true;
      back?.focus?.({ preventScroll: true });
      back = null;
      return;
    }
    if (drawer.hidden) back = document.activeElement;
    drawer.hidden = false;
    drawer.replaceChildren(...drawerParts(state, close));
    drawer.scrollTop = 0;
    drawer.querySelector(".close").focus();
  };
  state.on("sample", draw);
  state.on("decisions", () => {
    const row = drawer.querySelector(".decision");
    if (drawer.hidden || !row) return;
    const focused = row.contains(document.activeElement) && document.activeElement.dataset.decide;
    row.replaceWith(decisionRow(state.review, state.sample));
    if (focused) drawer.querySelector(`[data-decide=${focused}]`)?.focus();
  });
  state.on("threshold", () => !drawer.hidden && recount(state, drawer));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !drawer.hidden && !document.querySelector("dialog[open]")) close();
  });
}

function drawerParts(state, close) {
  const { data, sample } = state;
  const step = (by) => () => state.open((sample + by + data.n) % data.n);
  const head = element(
    "div",
    { class: "drawer-head" },
    element("h2", { id: "drawer-title" }, nameOf(data, sample)),
    button("‹", step(-1), { "aria-label": "previous sample" }),
    button("›", step(1), { "aria-label": "next sample" }),
    button("✕", close, { class: "close", "aria-label": "close" }),
  );
  const facts = Object.keys(data.columns).filter((key) => !HIDDEN.has(key) && key !== "name" && key !== "hard_neighbors").map((key) =>
    element("tr", { "data-field": key }, element("th", { scope: "row" }, data.words[key] ? term(data, key) : titleOf(data, key)), ...(isNumeric(data, key) ? [element("td", { class: "value" }, shown(data, key, sample)), standingCell(data, key, sample)] : [element("td", { colspan: 2 }, shown(data, key, sample))])),
  );
  const trust = trustIn(data, sample);
  return [
    head,
    element("div", { class: "drawer-top" }, enlargeable(data, sample), element("div", {}, headlineOf(data, sample), trust && element("div", { class: `trust ${trust.level}` }, element("strong", {}, trust.verdict), element("ul", {}, ...trust.reasons.map((reason) => element("li", {}, ...reason)))))),
    state.review ? decisionRow(state.review, sample) : null,
    element("h3", {}, "Most similar samples"),
    neighborLegend(data),
    passageLegend(data, sample),
    element("div", { class: "gallery neighbors" }, ...neighborTiles(state, sample)),
    element("h3", {}, "All numbers"),
    element("p", { class: "quiet" }, "The mark shows the rank among all samples, from the lowest (left) to the highest (right)."),
    element("table", { class: "facts" }, element("colgroup", {}, ...["name", "value", "place"].map((part) => element("col", { class: `${part}-column` }))), element("tbody", {}, ...facts)),
    element("h3", {}, "How similar are the others?"),
    histogramOf(state),
    thresholdOf(state),
  ].filter(Boolean);
}

// What it is labeled and what the network predicts, or the log-likelihood of a text; null where none is known.
function headlineOf(data, sample) {
  const { label, prediction } = data.columns;
  const strong = (name, mark = "") => element("strong", { class: mark }, shown(data, name, sample));
  if (data.columns.log_likelihood) return element("p", { class: "drawer-headline" }, term(data, "log_likelihood", "Log-likelihood"), " ", strong("log_likelihood"));
  if (!label && !prediction) return null;
  const same = label && prediction && shown(data, "label", sample) === shown(data, "prediction", sample);
  const words = same ? ["Labeled and predicted ", strong("label")]
    : label && prediction ? ["Labeled ", strong("label"), ", predicted ", strong("prediction", "signal")]
    : label ? ["Labeled ", strong("label")] : ["Predicted ", strong("prediction")];
  return element("p", { class: "drawer-headline" }, ...words);
}

// Whether a prediction can be trusted, by what similar samples say of it; null where they say nothing.
function trustIn(data, sample) {
  const { shift, agreement, status, novelty, prediction, label } = data.columns;
  if (!prediction || !shift) return null;
  const classes = isClass(data, "prediction");
  const reasons = [];
  const far = shift.values[sample] > (classes ? 0.5 : 1);
  reasons.push([`Similar samples are predicted ${far ? "differently" : "alike"} (`, term(data, "shift"), ` ${rounded(shift.values[sample])}).`]);
  const split = classes && agreement && agreement.values[sample] < 0.5;
  if (agreement) reasons.push([term(data, "agreement", "Neighbor agreement"), classes ? ` ${percent(agreement.values[sample])}: the share of similar samples, weighted by similarity, labeled ${shown(data, "prediction", sample)}.` : ` ${rounded(agreement.values[sample])} of 1: how close the labels of similar samples are to it.`]);
  const alone = status && status.texts[status.values[sample]] === "isolated";
  if (alone) reasons.push(["It has too few similar samples to judge by."]);
  const place = standing(data, "novelty", sample);
  const odd = data.n > 20 && place != null && place.below >= 0.98;
  if (place) reasons.push([`${unusualText(data, place)} (`, term(data, "novelty"), ` ${rounded(novelty.values[sample])}, ${rangeText(data, "novelty", place)}).`]);
  const other = classes && label && label.values[sample] !== prediction.values[sample];
  if (other) reasons.unshift([`It is labeled ${shown(data, "label", sample)}: the label or the prediction is wrong.`]);
  const weak = classes && agreement && agreement.values[sample] < 0.8;
  const level = far ? "no" : split || alone || odd || other || weak ? "care" : "yes";
  const said = shown(data, "prediction", sample);
  const verdict = { yes: `Prediction ${said}: no sign against it.`, care: `Prediction ${said}: use with care.`, no: `Prediction ${said}: do not rely on it.` }[level];
  return { level, verdict, reasons };
}

function unusualText(data, place) {
  if (!place.above) return "It is the most unusual of all samples";
  return place.below ? `It is ${standingText(data, "novelty", place)}` : "It is the least unusual of all samples";
}

function enlargeable(data, sample) {
  return element("button", { type: "button", class: "plain enlarge", "aria-label": `enlarge ${nameOf(data, sample)}`, onclick: () => enlarge(data, sample) }, picture(data, sample, true));
}

// The sample as large as the screen allows: what is kept in this file.
function enlarge(data, sample) {
  const box = document.getElementById("lightbox");
  box.querySelector(".seen").replaceChildren(picture(data, sample, true));
  box.querySelector(".caption").textContent = `${nameOf(data, sample)} · ${captionOf(data, sample)} · as stored in ${data.pictureSource ? "the run" : "this file"}`;
  box.showModal();
}

function makeLightbox() {
  const box = document.getElementById("lightbox");
  box.addEventListener("click", () => box.close());
}

// A number's place among all samples: a mark by rank, and the same in words with the range.
function standingCell(data, name, sample) {
  const place = standing(data, name, sample);
  if (!place) return element("td");
  const mark = drawing("svg", { viewBox: "0 0 100 8", class: "standing", "aria-hidden": "true" }, drawing("rect", { x: 0, y: 3, width: 100, height: 2 }), drawing("circle", { cx: 4 + 92 * ((place.below + 1 - place.above) / 2), cy: 4, r: 4 }));
  return element("td", { class: "standing-cell" }, place.low === place.high ? null : mark, element("span", {}, place.low === place.high ? standingText(data, name, place) : `${standingText(data, name, place)} · ${rangeText(data, name, place)}`));
}

// How many of the other samples are how similar; bars grow with the logarithm, so that few remain visible beside many.
function histogramOf(state) {
  const { data, sample } = state;
  const counts = otherCounts(data, sample);
  const bins = counts.length;
  const most = Math.max(1, ...counts);
  const height = (count) => (84 * Math.log1p(count)) / Math.log1p(most);
  const bars = counts.map((count, bin) => {
    const bar = drawing("rect", { x: 30 + (bin * 370) / bins, y: 92 - height(count), width: 370 / bins - 1, height: height(count), "data-bin": bin, "data-count": count });
    bar.append(drawing("title", {}, `similarity ${data.edges[bin]} to ${data.edges[bin + 1]}: ${counted(count, "sample")}`));
    return bar;
  });
  const mark = (text, x, anchor, y = 105) => drawing("text", { x, y, "text-anchor": anchor }, text);
  const ticks = [0, 10, 100, 1000, 10000, 100000].filter((count) => count < most / 2 || count === 0).concat(most);
  const lines = ticks.flatMap((count) => [drawing("line", { x1: 28, x2: 400, y1: 92 - height(count), y2: 92 - height(count) }), mark(count.toLocaleString("en"), 25, "end", 95.5 - height(count))]);
  const others = counts.reduce((a, b) => a + b, 0);
  return element("figure", { class: "histogram-figure" },
    drawing("svg", { viewBox: "0 0 400 120", class: "histogram", role: "img", "aria-label": `Histogram of the similarities of ${counted(others, "other sample")} to this one, on a logarithmic scale` }, ...lines, ...bars, mark("−1 opposite", 30, "start"), mark("0 unrelated", 215, "middle"), mark("1 the same", 400, "end"), mark("similarity to this sample", 215, "middle", 118)),
    element("figcaption", { class: "quiet" }, `Vertical axis: how many of the ${counted(others, "other sample")}, on a logarithmic scale. The sample itself is not counted.`));
}

function thresholdOf(state) {
  const slider = element("input", { type: "range", min: "-0.95", max: "0.95", step: "0.05", value: state.threshold, id: "drawer-threshold", oninput: (event) => state.setThreshold(Number(event.target.value)) });
  const told = element("output", { id: "near-count" });
  const made = element("label", { class: "threshold" }, "Similar from ", slider, told);
  queueMicrotask(() => recount(state, document.getElementById("drawer")));
  return made;
}

function recount(state, drawer) {
  const { data, sample, threshold } = state;
  const told = drawer.querySelector("#near-count");
  if (!told || sample == null) return;
  const bins = data.edges.length - 1;
  const count = otherCounts(data, sample).slice(Math.round(((threshold + 1) * bins) / 2)).reduce((a, b) => a + b, 0);
  told.textContent = ` ${threshold.toFixed(2)}: ${count.toLocaleString("en")} of the ${(data.n - 1).toLocaleString("en")} other samples`;
  told.dataset.count = count;
  drawer.querySelector("#drawer-threshold").value = threshold;
  drawer.querySelectorAll(".histogram rect").forEach((bar) => {
    bar.classList.toggle("in", data.edges[Number(bar.dataset.bin)] >= threshold - 1e-6);
  });
}
