// Near-duplicates as likewise.duplicates found them; or all neighbors from some similarity on, to look further.

const PAIRS_AT_ONCE = 18;
const LEVELS = [0.9, 0.95, 0.98, 0.99, 0.995, 0.999];

function makeDuplicates(state) {
  const { data } = state;
  const place = document.getElementById("duplicates");
  const told = document.getElementById("duplicates-what");
  const level = document.getElementById("duplicates-level");
  const across = document.getElementById("duplicates-across");
  const near = nearPairs(data, LEVELS[0]);
  const found = data.duplicates && Array.from(data.duplicates.first, (i, at) => ({ i, j: data.duplicates.second[at], similarity: data.duplicates.similarity[at], inputs: data.duplicates.input_similarity[at] }));
  if (found) level.append(element("option", { value: "found" }, "closer than usual"));
  level.append(...LEVELS.map((value) => element("option", { value }, `neighbors ≥ ${value}`)));
  across.append(element("option", { value: "" }, "any pair"), ...acrossColumns(data).map((name) => element("option", { value: name }, `different ${titleOf(data, name)}`)));
  let count = 0;
  let pairs = [];
  const more = document.getElementById("duplicates-more");
  const grow = () => {
    place.append(...pairs.slice(count, count + PAIRS_AT_ONCE).map((pair) => pairCard(state, pair)));
    count = Math.min(pairs.length, count + PAIRS_AT_ONCE);
    more.hidden = count >= pairs.length;
  };
  const tellClosest = () => {
    const closest = closestPair(data);
    const show = button("show", () => place.replaceChildren(pairCard(state, closest)), { class: "link", id: "duplicates-closest" });
    told.append(` The closest pair: ${closest.similarity.toFixed(2)} (`, show, ")");
  };
  const fill = () => {
    const column = data.columns[across.value];
    const all = level.value === "found" ? found : near.filter(({ similarity: s }) => s >= Number(level.value) - 1e-9);
    pairs = column ? all.filter(({ i, j }) => column.values[i] !== column.values[j]) : all;
    count = 0;
    place.replaceChildren();
    place.dataset.count = pairs.length;
    const samples = new Set(pairs.flatMap(({ i, j }) => [i, j]));
    told.textContent = pairs.length ? `${counted(pairs.length, "pair")} of ${counted(samples.size, "sample")}` : "None.";
    if (!pairs.length && !column && data.k) tellClosest();
    grow();
  };
  more.addEventListener("click", grow);
  for (const field of [level, across]) field.addEventListener("change", fill);
  fill();
}

function closestPair(data) {
  let best = 0;
  for (let i = 1; i < data.n; i++) if (similarity(data, i, 0) > similarity(data, best, 0)) best = i;
  return { i: best, j: data.neighbors[best * data.k], similarity: similarity(data, best, 0) };
}

function nearPairs(data, least) {
  const found = new Map();
  for (let i = 0; i < data.n; i++) {
    for (let rank = 0; rank < data.k; rank++) {
      const value = similarity(data, i, rank);
      if (value < least) break; // the most similar come first
      const j = data.neighbors[i * data.k + rank];
      found.set(Math.min(i, j) * data.n + Math.max(i, j), { i: Math.min(i, j), j: Math.max(i, j), similarity: value });
    }
  }
  return [...found.values()].sort((a, b) => b.similarity - a.similarity);
}

// Columns in which two copies should not differ: the label, and splits or sources of one's own.
const acrossColumns = (data) => [...["label"].filter((name) => data.columns[name] && isClass(data, name)), ...data.ownColumns.filter((name) => data.columns[name].kind === "text" && data.columns[name].texts.length <= 40)];

function pairCard(state, { i, j, similarity: s, inputs }) {
  const { data } = state;
  const differs = acrossColumns(data).filter((name) => data.columns[name].values[i] !== data.columns[name].values[j]);
  return element(
    "div",
    { class: "pair", "data-pair": `${i}:${j}` },
    tile(state, i),
    element("div", { class: "alike" }, element("strong", { title: "similarity to the network" }, s.toFixed(3)), inputs >= -1 ? element("span", { title: "similarity of the inputs" }, `inputs ${inputs.toFixed(2)}`) : null, ...differs.map((name) => element("span", { class: "tag" }, `${shown(data, name, i)} / ${shown(data, name, j)}`))),
    tile(state, j),
  );
}
