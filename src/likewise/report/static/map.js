// The map: every sample as a point, colored by any column; a circle selects.

const MOST_CHIPS = 20;
const STEPS = 64; // of color, for numbers

function makeMap(state) {
  const { data } = state;
  const color = document.getElementById("color");
  const layout = document.getElementById("layout");
  for (const name of colorable(data)) color.append(element("option", { value: name }, titleOf(data, name)));
  const scatter = makeScatter(document.getElementById("map"), data, {
    label: "Map of all samples. The table below holds the same samples and can be used by keyboard.",
    square: true,
    pictures: true,
    onCircle: (samples) => (samples ? state.select(samples, "circled on the map") : state.showAll()),
    onOpen: (sample) => state.open(sample),
    describe: (sample) => describePoint(data, sample, color.value),
  });
  const place = () => {
    const flat = layout?.value === "pca";
    const [x, y] = flat ? data.directions : [data.columns.map_x.values, data.columns.map_y.values];
    scatter.setPlaces(x, y);
    paint();
  };
  const paint = () => {
    const { groups, palette, chips, names } = coloring(data, color.value, scatter.x, scatter.y);
    scatter.setColors(groups, palette, names ?? classNames(data, scatter.x, scatter.y));
    document.getElementById("legend").replaceChildren(...chips.map((chip) => legendChip(state, color.value, chip)));
  };
  place();
  color.addEventListener("change", paint);
  layout?.addEventListener("change", place);
  state.on("theme", paint);
  state.on("selection", () => scatter.setSelected(state.selected));
  const ring = () => scatter.setRing(state.focus, state.focus == null ? [] : neighborsOf(data, state.focus));
  state.on("focus", ring);
  ring();
}

const neighborsOf = (data, sample) => Array.from(data.neighbors.subarray(sample * data.k, (sample + 1) * data.k));

function colorable(data) {
  const wanted = ["label", "prediction", "label_suspicion", "label_issue", "suggested_label", "status", "novelty", "log_likelihood", "shift", "error", "agreement", "local_density", "density", "hard_neighbors", "uncertainty", "chance_wrong", "margin"];
  const known = Object.keys(data.columns).filter((name) => !HIDDEN.has(name) && name !== "name");
  return [...wanted.filter((name) => known.includes(name)), ...known.filter((name) => !wanted.includes(name))];
}

function describePoint(data, sample, name) {
  const lines = [nameOf(data, sample)];
  if (data.columns.label) lines.push(`label ${shown(data, "label", sample)}`);
  if (data.columns.label_issue?.values[sample]) lines.push(`looks like ${shown(data, "suggested_label", sample)}`);
  if (name !== "label") lines.push(`${titleOf(data, name)} ${shown(data, name, sample)}`);
  return lines;
}

// What each sample is colored by: the place of its color in a palette, what the legend says, and names on the map.
function coloring(data, name, x, y) {
  const { kind, values, texts } = data.columns[name];
  if (kind !== "f" && (kind !== "i" || isClass(data, name))) {
    const titles = kind === "text" ? (name === "status" ? texts.map((text) => data.statuses[text].title) : texts) : kind === "truth" ? ["no", "yes"] : data.classes;
    return classColoring(data, values, titles, x, y, kind === "truth");
  }
  const groups = new Uint8Array(data.n);
  const known = Float32Array.from(values.filter((value) => Number.isFinite(value))).sort();
  const [low, high] = [known[Math.floor(0.01 * known.length)] ?? 0, known[Math.ceil(0.99 * (known.length - 1))] ?? 1];
  for (let i = 0; i < data.n; i++) {
    const share = (values[i] - low) / (high - low || 1);
    groups[i] = Math.max(0, Math.min(STEPS - 1, Math.floor((Number.isFinite(share) ? share : 0) * STEPS)));
  }
  const palette = Array.from({ length: STEPS }, (_, step) => rampAt(step / (STEPS - 1)));
  return { groups, palette, names: null, chips: [{ ramp: palette, low: rounded(low), high: rounded(high) }] };
}

function classColoring(data, values, titles, x, y, isTruth) {
  const groups = new Uint8Array(data.n);
  const members = new Map();
  for (let i = 0; i < data.n; i++) {
    const value = values[i];
    groups[i] = value % COLORS.length;
    if (!members.has(value)) members.set(value, []);
    members.get(value).push(i);
  }
  const palette = isTruth ? [rgbOf("#9aa3ab"), rgbOf(COLORS[3])] : COLORS.map(rgbOf);
  const sorted = [...members.entries()].sort((a, b) => a[0] - b[0]);
  const chips = sorted.slice(0, MOST_CHIPS).map(([value, samples]) => ({ title: titles?.[value] ?? String(value), color: palette[value % palette.length], samples }));
  if (sorted.length > MOST_CHIPS) chips.push({ more: sorted.length - MOST_CHIPS });
  const [left, right] = ends(x, data.n);
  const cell = (right - left) / 24 || 1;
  const names = isTruth ? null : sorted.length < 2 ? [] : sorted.sort((a, b) => b[1].length - a[1].length).slice(0, 60).map(([value, samples]) => ({ text: titles?.[value] ?? String(value), ...thickOf(samples, x, y, cell), color: palette[value % palette.length] }));
  return { groups, palette, names, chips };
}

// Where the classes are, on a map that is colored by something else.
function classNames(data, x, y) {
  const group = groupColumn(data);
  if (!group) return [];
  const quiet = rgbOf(STATUS_COLORS[0]);
  return classColoring(data, data.columns[group].values, data.classes, x, y, false).names.map((name) => ({ ...name, color: quiet }));
}

// Where a class is thickest: the mean of its samples around the fullest cell of a grid. A median would lie between groups.
function thickOf(samples, x, y, cell) {
  const counts = new Map();
  const [column, row] = [(i) => Math.floor(x[i] / cell), (i) => Math.floor(y[i] / cell)];
  const key = (a, b) => `${a},${b}`;
  for (const i of samples) counts.set(key(column(i), row(i)), (counts.get(key(column(i), row(i))) ?? 0) + 1);
  const near = [-1, 0, 1];
  let best = { sum: -1 };
  for (const cellKey of counts.keys()) {
    const [a, b] = cellKey.split(",").map(Number);
    const sum = near.reduce((all, da) => all + near.reduce((part, db) => part + (counts.get(key(a + da, b + db)) ?? 0), 0), 0);
    if (sum > best.sum) best = { sum, a, b };
  }
  const around = samples.filter((i) => Math.abs(column(i) - best.a) <= 1 && Math.abs(row(i) - best.b) <= 1);
  const mean = (of) => around.reduce((sum, i) => sum + of[i], 0) / around.length;
  return { x: mean(x), y: mean(y) };
}

function legendChip(state, name, chip) {
  if (chip.more) return element("span", { class: "more" }, `and ${chip.more} more`);
  if (chip.ramp) {
    const stops = [0, 21, 42, 63].map((step) => `rgb(${chip.ramp[step]})`).join(", ");
    return element("span", { class: "ramp" }, chip.low, element("span", { class: "bar", style: `background: linear-gradient(to right, ${stops})` }), chip.high);
  }
  const what = `${titleOf(state.data, name)} ${chip.title}`;
  return element("button", { type: "button", class: "chip", title: `select ${what}`, onclick: () => state.select(chip.samples, what) }, element("span", { class: "swatch", style: `background: rgb(${chip.color})` }), chip.title);
}
