// Near-duplicates as likewise.duplicates found them; or all neighbors from some similarity on, to look further.

const PAIRS_AT_ONCE = 18;
const INPUTS_EQUAL = 0.98; // two inputs that are nearly the same
const LEVELS = [0.9, 0.95, 0.98, 0.99, 0.995, 0.999];

function makeDuplicates(state) {
  const { data } = state;
  const place = document.getElementById("duplicates");
  const told = document.getElementById("duplicates-what");
  const level = document.getElementById("duplicates-level");
  const across = document.getElementById("duplicates-across");
  const found = data.duplicates && Array.from(data.duplicates.first, (i, at) => ({ i, j: data.duplicates.second[at], similarity: data.duplicates.similarity[at], inputs: data.duplicates.input_similarity[at] }));
  const inputs = new Map(found?.map((pair) => [pairKey(data, pair), pair.inputs]));
  const near = nearPairs(data, LEVELS[0]).map((pair) => ({ ...pair, inputs: inputs.get(pairKey(data, pair)) }));
  const equal = (found ?? []).filter((pair) => pair.inputs >= INPUTS_EQUAL);
  if (found) level.append(element("option", { value: "found" }, data.classes ? "closer than usual in their class" : "closer than usual"));
  if (equal.length) level.append(element("option", { value: "inputs" }, `${inputsWord(data)} nearly equal: at least ${INPUTS_EQUAL}`));
  level.append(...LEVELS.map((value) => element("option", { value }, `similarity to the network at least ${value}`)));
  across.append(element("option", { value: "" }, "all pairs"), ...acrossColumns(data).map((name) => element("option", { value: name }, `pairs with different ${titleOf(data, name)}`)));
  let count = 0;
  let pairs = [];
  const more = document.getElementById("duplicates-more");
  const csv = document.getElementById("duplicates-csv");
  const said = document.getElementById("duplicates-downloaded");
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
    const all = level.value === "found" ? found : level.value === "inputs" ? equal : near.filter(({ similarity: s }) => s >= Number(level.value) - 1e-9);
    pairs = column ? all.filter(({ i, j }) => column.values[i] !== column.values[j]) : all;
    count = 0;
    place.replaceChildren();
    csv.disabled = !pairs.length;
    place.dataset.count = pairs.length;
    const samples = new Set(pairs.flatMap(({ i, j }) => [i, j]));
    told.textContent = pairs.length ? `${counted(pairs.length, "pair")} of ${counted(samples.size, "sample")}` : "None.";
    if (!pairs.length && !column && data.k) tellClosest();
    grow();
  };
  more.addEventListener("click", grow);
  csv.addEventListener("click", () => {
    save("pairs.csv", "text/csv", pairsTable(data, pairs));
    said.textContent = `pairs.csv downloaded (${counted(pairs.length, "pair")}).`;
  });
  document.getElementById("duplicates-decisions")?.addEventListener("click", () => download(state, state.review.decisions, said));
  state.on("decisions", () => place.querySelectorAll(".pair").forEach((card) => showDropped(state, card)));
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

const pairKey = (data, { i, j }) => Math.min(i, j) * data.n + Math.max(i, j);
const inputsWord = (data) => (data.pictures.images ? "pixels" : "inputs");

// The numbers of a pair's samples, for a program that leaves copies out; fields of texts are quoted.
function pairsTable(data, pairs) {
  const columns = acrossColumns(data);
  const field = (value) => `"${String(value).replaceAll('"', '""')}"`;
  const head = ["first", "second", "similarity", "input_similarity", ...columns.flatMap((name) => [`first_${name}`, `second_${name}`]).map(field)];
  const rows = pairs.map(({ i, j, similarity: s, inputs }) => [i, j, s.toFixed(4), inputs >= -1 ? inputs.toFixed(4) : "", ...columns.flatMap((name) => [i, j].map((sample) => field(shown(data, name, sample))))]);
  return [head, ...rows].map((row) => `${row.join(",")}\n`).join("");
}

function pairCard(state, { i, j, similarity: s, inputs }) {
  const { data } = state;
  const differs = acrossColumns(data).filter((name) => data.columns[name].values[i] !== data.columns[name].values[j]);
  const split = data.ownColumns.find((name) => name.toLowerCase() === "split");
  const side = (sample) => element(
    "div",
    { class: "side" },
    tile(state, sample, `#${sample}${split ? ` · ${shown(data, split, sample)}` : ""}`),
    state.review ? button("", () => state.review.toggleDrop(sample), { "data-drop": sample, "aria-label": `Drop this copy, sample ${sample}` }) : null,
  );
  const card = element(
    "div",
    { class: "pair", "data-pair": `${i}:${j}` },
    side(i),
    element(
      "div",
      { class: "alike" },
      element("strong", { title: "similarity to the network" }, s.toFixed(3)),
      inputs >= -1 ? element("span", { title: "similarity of the inputs" }, `${inputsWord(data)} ${inputs.toFixed(2)}`) : null,
      ...differs.map((name) => element("span", { class: "tag", title: titleOf(data, name) }, `${shown(data, name, i)} / ${shown(data, name, j)}`)),
      element("span", { class: "both", hidden: true }, "Both dropped: no copy is kept."),
    ),
    side(j),
  );
  showDropped(state, card);
  return card;
}

function showDropped(state, card) {
  const drops = [...card.querySelectorAll("[data-drop]")];
  const dropped = drops.map((made) => state.review.decisions[made.dataset.drop]?.verdict === "drop");
  drops.forEach((made, at) => {
    made.setAttribute("aria-pressed", String(dropped[at]));
    made.textContent = dropped[at] ? "Dropped ✗" : "Drop this copy";
  });
  card.querySelector(".both").hidden = !(drops.length && dropped.every(Boolean));
}
