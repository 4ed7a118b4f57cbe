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
    element("tr", {}, element("th", { scope: "row" }, data.words[key] ? term(data, key) : titleOf(data, key)), element("td", {}, shown(data, key, sample))),
  );
  const flag = data.columns.label_issue?.values[sample]
    ? element("p", { class: "flag" }, `Labeled ${shown(data, "label", sample)}; similar samples speak for ${shown(data, "suggested_label", sample)}.`)
    : null;
  const trust = trustIn(data, sample);
  return [
    head,
    element("div", { class: "drawer-top" }, enlargeable(data, sample), element("div", {}, flag, trust && element("div", { class: `trust ${trust.level}` }, element("strong", {}, trust.verdict), element("ul", {}, ...trust.reasons.map((reason) => element("li", {}, reason)))))),
    state.review ? decisionRow(state.review, sample) : null,
    element("h3", {}, "Treated most alike"),
    element("div", { class: "gallery neighbors" }, ...neighborTiles(state, sample)),
    element("h3", {}, "All numbers"),
    element("table", { class: "facts" }, element("tbody", {}, ...facts)),
    element("h3", {}, "How similar is everyone?"),
    histogramOf(state),
    thresholdOf(state),
  ].filter(Boolean);
}

// Whether a prediction can be trusted, by what similar samples say of it; null where they say nothing.
function trustIn(data, sample) {
  const { shift, agreement, status, novelty, prediction } = data.columns;
  if (!prediction || !shift) return null;
  const classes = isClass(data, "prediction");
  const reasons = [];
  const far = shift.values[sample] > (classes ? 0.5 : 1);
  reasons.push(far ? `Similar samples are predicted differently (${titleOf(data, "shift")} ${rounded(shift.values[sample])}).` : `Similar samples are predicted alike (${titleOf(data, "shift")} ${rounded(shift.values[sample])}).`);
  const split = classes && agreement && agreement.values[sample] < 0.5;
  if (agreement) reasons.push(classes ? `${percent(agreement.values[sample])} of the neighbors' votes are for ${shown(data, "prediction", sample)}.` : `Labels of similar samples agree with it: ${rounded(agreement.values[sample])} of 1.`);
  const alone = status && status.texts[status.values[sample]] === "isolated";
  if (alone) reasons.push("It has too few similar samples to judge by.");
  let below = 0;
  for (let i = 0; i < data.n; i++) below += novelty.values[i] < novelty.values[sample];
  const odd = data.n > 20 && below / data.n >= 0.98;
  reasons.push(`It is more unlike the rest than ${percent(below / data.n)} of the samples.`);
  const level = far ? "no" : split || alone || odd ? "care" : "yes";
  const said = shown(data, "prediction", sample);
  const verdict = { yes: `Prediction ${said}: nothing speaks against it.`, care: `Prediction ${said}: with care.`, no: `Prediction ${said}: do not rely on it.` }[level];
  return { level, verdict, reasons };
}

function enlargeable(data, sample) {
  return element("button", { type: "button", class: "plain enlarge", "aria-label": `enlarge ${nameOf(data, sample)}`, onclick: () => enlarge(data, sample) }, picture(data, sample, true));
}

// The sample as large as the screen: what is kept in this file, or the original where a server may show it.
function enlarge(data, sample) {
  const box = document.getElementById("lightbox");
  const seen = data.originals ? element("img", { src: data.originals.replace("{sample}", sample), alt: `sample ${sample}` }) : picture(data, sample, true);
  box.querySelector(".seen").replaceChildren(seen);
  box.querySelector(".caption").textContent = `${nameOf(data, sample)} · ${captionOf(data, sample)}${data.originals ? "" : " · as kept in this file"}`;
  box.showModal();
}

function makeLightbox() {
  const box = document.getElementById("lightbox");
  box.addEventListener("click", () => box.close());
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
  return drawing("svg", { viewBox: "0 0 400 112", class: "histogram", role: "img", "aria-label": "Histogram of similarities to all samples, on a logarithmic scale" }, ...bars, mark("−1", 0, "start"), mark("0", 200, "middle"), mark("1", 400, "end"));
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
  const count = countFrom(data, sample, threshold);
  told.textContent = ` ${threshold.toFixed(2)}: ${count.toLocaleString("en")} of ${data.n.toLocaleString("en")} samples`;
  told.dataset.count = count;
  drawer.querySelector("#drawer-threshold").value = threshold;
  drawer.querySelectorAll(".histogram rect").forEach((bar) => {
    bar.classList.toggle("in", data.edges[Number(bar.dataset.bin)] >= threshold - 1e-6);
  });
}
