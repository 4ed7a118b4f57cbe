// One sample: what it is, whom it is like, how similar everyone is to it.

function makeDrawer(state) {
  const drawer = document.getElementById("drawer");
  let back = null;
  const close = () => state.open(null);
  const draw = () => {
    if (state.sample == null) {
      drawer.hidden = true;
      back?.focus?.();
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
  state.on("threshold", () => !drawer.hidden && recount(state, drawer));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !drawer.hidden) close();
  });
}

function drawerParts(state, close) {
  const { data, sample } = state;
  const name = data.columns.name ? shown(data, "name", sample) : `Sample ${sample}`;
  const step = (by) => () => state.open((sample + by + data.n) % data.n);
  const head = element(
    "div",
    { class: "drawer-head" },
    element("h2", { id: "drawer-title" }, name),
    element("button", { type: "button", "aria-label": "previous sample", onclick: step(-1) }, "‹"),
    element("button", { type: "button", "aria-label": "next sample", onclick: step(1) }, "›"),
    element("button", { type: "button", class: "close", "aria-label": "close", onclick: close }, "✕"),
  );
  const facts = Object.keys(data.columns).filter((key) => !HIDDEN.has(key) && key !== "name" && key !== "hard_neighbors").map((key) =>
    element("tr", { title: MEANINGS[key] ?? key }, element("th", {}, key.replaceAll("_", " ")), element("td", {}, shown(data, key, sample))),
  );
  const flag = data.columns.label_issue?.values[sample]
    ? element("p", { class: "flag" }, `Its neighbors vote for ${shown(data, "suggested_label", sample)}, not ${shown(data, "label", sample)}.`)
    : null;
  return [
    head,
    element("div", { class: "drawer-top" }, picture(data, sample, true), element("table", { class: "facts" }, ...facts)),
    flag,
    element("h3", {}, "Treated most alike"),
    element("div", { class: "gallery neighbors" }, ...neighborTiles(state, sample)),
    element("h3", {}, "How similar is everyone?"),
    histogramOf(state),
    thresholdOf(state),
  ].filter(Boolean);
}

function neighborTiles(state, sample) {
  const { data } = state;
  const group = data.columns.label ?? data.columns.prediction;
  const comparable = group && group.kind !== "f";
  return Array.from({ length: data.k }, (_, rank) => {
    const other = data.neighbors[sample * data.k + rank];
    const mark = !comparable ? "" : group.values[other] === group.values[sample] ? "same" : "other";
    return tile(state, other, similarity(data, sample, rank).toFixed(2), mark);
  });
}

function histogramOf(state) {
  const { data, sample } = state;
  const bins = data.edges.length - 1;
  const counts = data.counts.subarray(sample * bins, (sample + 1) * bins);
  const top = Math.log1p(counts.reduce((a, b) => Math.max(a, b), 1));
  const bars = Array.from(counts, (count, bin) => {
    const height = (90 * Math.log1p(count)) / top;
    const bar = drawing("rect", { x: (bin * 400) / bins, y: 92 - height, width: 400 / bins - 1, height, "data-bin": bin });
    bar.append(drawing("title", {}, `${data.edges[bin]} to ${data.edges[bin + 1]}: ${count}`));
    return bar;
  });
  const mark = (text, x, anchor) => drawing("text", { x, y: 108, "text-anchor": anchor }, text);
  return drawing("svg", { viewBox: "0 0 400 112", class: "histogram", role: "img", "aria-label": "Histogram of similarities to all samples, on a logarithmic scale" }, ...bars, mark("-1", 0, "start"), mark("0", 200, "middle"), mark("1", 400, "end"));
}

function thresholdOf(state) {
  const slider = element("input", { type: "range", min: "-0.95", max: "0.95", step: "0.05", value: state.threshold, id: "drawer-threshold", oninput: (event) => state.setThreshold(Number(event.target.value)) });
  const told = element("output", { id: "near-count" });
  const made = element("label", { class: "threshold" }, "Alike from ", slider, told);
  queueMicrotask(() => recount(state, document.getElementById("drawer")));
  return made;
}

function recount(state, drawer) {
  const { data, sample, threshold } = state;
  const count = countFrom(data, sample, threshold);
  const told = drawer.querySelector("#near-count");
  if (!told) return;
  told.textContent = ` ${threshold.toFixed(2)}: ${count.toLocaleString("en")} of ${data.n.toLocaleString("en")} samples`;
  told.dataset.count = count;
  drawer.querySelector("#drawer-threshold").value = threshold;
  drawer.querySelectorAll(".histogram rect").forEach((bar) => {
    bar.classList.toggle("in", data.edges[Number(bar.dataset.bin)] >= threshold - 1e-6);
  });
}
