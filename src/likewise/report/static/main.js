// Put the page together, and keep its address in step: #sample=42, #select=status:isolated, #where={"label":"=cat"}.

function selectNamed(state, name, { focus = true } = {}) {
  const found = namedSelection(state.data, name);
  if (!found) return;
  state.select(found.samples, found.what, name);
  goToSamples(focus);
}

// The samples come into view, and the keyboard goes on there.
function goToSamples(focus = true) {
  document.getElementById("samples-part").scrollIntoView({ behavior: "auto" });
  if (focus) document.getElementById("samples-title").focus({ preventScroll: true });
}

const addressed = () => new URLSearchParams(location.hash.slice(1));

function remember(change) {
  const known = addressed();
  for (const [name, value] of Object.entries(change)) value == null ? known.delete(name) : known.set(name, value);
  [...known.keys()].filter((name) => !["sample", "select", "where"].includes(name)).forEach((name) => known.delete(name));
  history.replaceState(null, "", known.size ? `#${known}` : location.pathname + location.search);
}

function followAddress(state) {
  const known = addressed();
  const sample = Number(known.get("sample"));
  if (known.has("select") && known.get("select") !== state.name) selectNamed(state, known.get("select"), { focus: false });
  const filters = addressedFilters(state.data, known.get("where"));
  if (filters.some(([name, wanted]) => state.filters.get(name) !== wanted)) state.filter(filters);
  const isThere = known.has("sample") && Number.isInteger(sample) && sample >= 0 && sample < state.data.n;
  if (isThere && sample !== state.sample) state.open(sample);
}

// The filters of an address; what is not of this run is left out.
function addressedFilters(data, text) {
  try {
    const found = Object.entries(JSON.parse(text ?? "{}"));
    return found.filter(([name, wanted]) => (name === "sample" || data.columns[name]) && typeof wanted === "string" && wanted);
  } catch {
    return [];
  }
}

function makeSelectionLine(state) {
  const line = document.getElementById("selection");
  state.on("selection", () => {
    // A circle has no address: an older one would be wrong, and so would filters without it.
    const named = !state.group || state.name;
    remember({ select: state.name, where: named && state.filters.size ? JSON.stringify(Object.fromEntries(state.filters)) : null });
    line.hidden = !state.selected;
    if (!state.selected) return;
    const parts = `Map, pictures, table${state.review ? " and review" : ""} show `;
    line.replaceChildren(element("span", { class: "where" }, parts), element("strong", {}, counted(state.selected.length, "sample")), `: ${state.describe()}. `, element("a", { href: "#samples-part" }, "Pictures"), " ", button("Show all again", state.showAll, { id: "release" }));
  });
}

function makeSearch(state) {
  const form = document.getElementById("search");
  const field = form.querySelector("input");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = field.value.trim();
    if (!text) return state.showAll();
    const number = numbered(state.data, text);
    if (number == null || state.data.classes?.includes(text)) selectNamed(state, `search:${text}`, { focus: false }); // the field keeps the focus: one may search again
    if (number != null) state.open(number);
  });
}

function makeThreshold(state) {
  const slider = document.getElementById("threshold");
  const told = document.getElementById("threshold-value");
  const show = () => {
    slider.value = state.threshold;
    told.textContent = state.threshold.toFixed(2);
  };
  slider.addEventListener("change", () => state.setThreshold(Number(slider.value)));
  slider.addEventListener("input", () => (told.textContent = Number(slider.value).toFixed(2)));
  state.on("threshold", show);
  show();
}

function makeTheme(state) {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    state.themed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", state.themed);
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    document.querySelectorAll("details.note").forEach((note) => (note.open = true)); // paper cannot be opened
    root.dataset.theme = "light";
    state.themed();
  });
  addEventListener("afterprint", () => {
    before ? (root.dataset.theme = before) : delete root.dataset.theme;
    state.themed();
  });
}

// Without labels that are classes: the samples that matter most, with their neighbors.
function makeWorst(state) {
  const { data } = state;
  const place = document.getElementById("worst");
  if (!place) return;
  const ranked = rankedBy(data);
  const { values } = data.columns[ranked];
  const order = Array.from({ length: data.n }, (_, i) => i).sort((a, b) => values[b] - values[a]).slice(0, 4);
  const legend = passageLegend(data);
  if (legend) place.append(legend);
  place.append(
    ...order.map((sample) =>
      element("article", { class: "worst-sample" }, tile(state, sample, `${titleOf(data, ranked)} ${rounded(values[sample])}`), element("div", {}, element("p", {}, "most similar samples, with their similarity:"), element("div", { class: "gallery neighbors" }, ...neighborTiles(state, sample, 5)))),
    ),
  );
}

// Let the browser draw what is there, before more is made.
const breath = () => new Promise((resume) => setTimeout(resume, 0));

const FIRST = [makeReview, makeWorst, makeMap, makeDrawer, makeLightbox, makeSearch];
const LATER = [makeGallery, makeTable, makeThreshold, makeClasses, makeDuplicates, makeSlices, makeNeighborhoods, makeTraining, makeDensity];

async function start() {
  const state = makeState(await readData(document.getElementById("data")));
  document.body.classList.toggle("wide-tiles", state.data.pictures.wide);
  makeTips(state.data);
  makeTheme(state);
  makeSelectionLine(state);
  FIRST.forEach((make) => make(state));
  document.body.dataset.interactive = Math.round(performance.now());
  for (const make of LATER) {
    await breath();
    make(state);
  }
  state.on("sample", () => remember({ sample: state.sample }));
  document.querySelectorAll("[data-opens]").forEach((opener) => opener.addEventListener("click", () => selectNamed(state, opener.dataset.opens)));
  window.addEventListener("hashchange", () => followAddress(state));
  followAddress(state);
  document.body.dataset.drawn = Math.round(performance.now());
  requestAnimationFrame(() => (document.body.dataset.ready = "yes")); // after the frames that were asked for above
}

start().catch((error) => {
  document.querySelector("main").prepend(element("p", { class: "note" }, `This report could not be drawn: ${error.message}. It needs a browser from 2023 or later.`));
  throw error;
});
