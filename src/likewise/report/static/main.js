// Put the page together, and keep its address in step: #sample=42, #select=status:isolated.

function selectNamed(state, name) {
  const found = namedSelection(state.data, name);
  if (!found) return;
  state.select(found.samples, found.what, "name");
  remember({ select: name });
  document.getElementById("gallery-part").scrollIntoView({ behavior: "auto" });
}

const addressed = () => new URLSearchParams(location.hash.slice(1));

function remember(change) {
  const known = addressed();
  for (const [name, value] of Object.entries(change)) value == null ? known.delete(name) : known.set(name, value);
  [...known.keys()].filter((name) => !["sample", "select"].includes(name)).forEach((name) => known.delete(name));
  history.replaceState(null, "", `#${known}`);
}

function followAddress(state) {
  const known = addressed();
  const sample = Number(known.get("sample"));
  if (known.has("select")) selectNamed(state, known.get("select"));
  if (known.has("sample") && Number.isInteger(sample) && sample >= 0 && sample < state.data.n) state.open(sample);
}

function makeSelectionLine(state) {
  const line = document.getElementById("selection");
  state.on("selection", () => {
    line.hidden = !state.selected;
    if (!state.selected) return remember({ select: null });
    const release = element("button", { type: "button", id: "release", onclick: () => state.select(null, "", "line") }, "Show all again");
    line.replaceChildren(`${state.selected.length.toLocaleString("en")} samples: ${state.what}. `, release);
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
}

// Let the browser draw what is there, before more is made.
const breath = () => new Promise((resume) => setTimeout(resume, 0));

async function start() {
  const state = makeState(await readData());
  document.body.classList.toggle("wide-tiles", state.data.pictures.wide);
  makeTheme(state);
  makeSelectionLine(state);
  for (const make of [makeReview, makeGallery, makeDensity, makeMatrices, makeDrawer, makeMap, makeThreshold, makeTable, makeNeighborhoods]) {
    make(state);
    await breath();
  }
  state.on("sample", () => remember({ sample: state.sample }));
  document.querySelectorAll("[data-opens]").forEach((button) => button.addEventListener("click", () => selectNamed(state, button.dataset.opens)));
  window.addEventListener("hashchange", () => followAddress(state));
  followAddress(state);
  document.body.dataset.ready = "yes";
}

start().catch((error) => {
  document.querySelector("main").prepend(element("p", { class: "note" }, `This report could not be drawn: ${error.message}. A browser of 2023 or later is needed.`));
  throw error;
});
