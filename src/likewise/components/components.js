// What the live page and the notebook widget share: pictures, the review queue, the map with a lasso.
// Text is always set as text, never as HTML.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// A sample as a person sees it.
export function renderPicture(picture, name, size = "small") {
  if (!picture) return element("span", { class: `lw-picture lw-none lw-${size}` }, name);
  if (picture.kind === "image") return element("img", { class: `lw-picture lw-${size}`, src: picture.content, alt: name });
  if (picture.kind === "text") return element("span", { class: `lw-picture lw-text lw-${size}` }, picture.content);
  if (picture.kind === "signal") return renderSignal(picture.content, size);
  const cells = Object.entries(picture.content).slice(0, size === "small" ? 4 : 40);
  const rows = cells.map(([key, value]) => element("tr", {}, element("th", {}, key), element("td", {}, String(value))));
  return element("span", { class: `lw-picture lw-row lw-${size}` }, element("table", {}, ...rows));
}

function renderSignal(values, size) {
  const known = values.filter((v) => v != null);
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawn.setAttribute("viewBox", "0 0 100 40");
  drawn.setAttribute("class", `lw-picture lw-${size}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", values.map((v, i) => (v == null ? "" : `${(100 * i) / (values.length - 1 || 1)},${38 - (36 * (v - low)) / span}`)).join(" "));
  line.setAttribute("fill", "none");
  line.setAttribute("stroke", "currentColor");
  drawn.append(line);
  return drawn;
}

export function neighborTile(near, same) {
  const similarity = near.similarity == null ? "" : `${near.similarity.toFixed(2)}${near.error ? ` ± ${near.error.toFixed(2)}` : ""}`;
  return element(
    "figure",
    { class: `lw-tile${same == null ? "" : same ? " lw-same" : " lw-other"}` },
    renderPicture(near.picture, near.name),
    element("figcaption", {}, element("strong", {}, near.label_name || near.name), element("span", { class: "lw-quiet" }, similarity || near.name)),
  );
}

// --- the review queue ------------------------------------------------------------------------------------------------

const VERDICTS = Object.fromEntries(REVIEW_KEYS.filter(({ verdict }) => verdict).map(({ verdict, title }) => [verdict, title]));
const PAGE = 10;

// A share in percent; one that is not certain is never rounded to all or nothing.
const chance = (share) => (share > 0.99 ? "> 99 %" : share < 0.01 ? "< 1 %" : `${Math.round(100 * share)} %`);

// source: { classes, total, flagged, decisions: {sample: {verdict, label}}, load(start, count), decide(sample, decision or null), everywhere }
// root.dataset.saving says how many decisions are on their way.
export function mountReview(root, source) {
  const entries = [];
  const past = [];
  const decisions = { ...source.decisions };
  let at = 0;
  let note = "";
  let filling = Promise.resolve();
  let saving = Promise.resolve();
  const pending = new Map(); // sample -> how many of its decisions are on their way
  const current = () => entries[at];
  const isOther = (entry) => entry.suggested_label != null && entry.suggested_label !== entry.label;

  // One after the other: two that ask for more in the same moment get the same samples.
  const fill = (place) => (filling = filling.then(() => load(place)));

  async function load(place) {
    while (entries.length <= place && entries.length < source.total) {
      const more = await source.load(entries.length, PAGE).catch((error) => {
        note = `Not loaded: ${error.message}`;
        return [];
      });
      if (!more.length) return;
      entries.push(...more);
    }
  }

  async function go(place) {
    at = Math.max(0, Math.min(source.total - 1, place));
    if (!current()) {
      draw(); // a key that comes before the next sample is seen decides nothing
      await fill(at);
    }
    draw();
    fill(Math.min(source.total - 1, at + 3)); // the next ones, while this one is looked at
  }

  // Key and button alike: a suggestion that few neighbors carry is not taken at once, but put into the field of classes.
  function decideOrAsk(verdict) {
    const entry = current();
    const field = root.querySelector(".lw-field");
    if (verdict !== "relabel" || !entry?.doubtful || !field) return decide(verdict);
    field.value = entry.suggested_label_name;
    field.focus();
    field.select();
  }

  function decide(verdict, label) {
    const entry = current();
    if (!entry) return;
    if (verdict === "relabel" && label == null && !isOther(entry)) return; // there is no other label to take
    const decision = verdict === "relabel" ? { verdict, label: label ?? entry.suggested_label } : { verdict };
    past.push({ sample: entry.sample, before: decisions[entry.sample] ?? null, at });
    save(entry.sample, decision);
    return go(at + 1);
  }

  function undo() {
    const last = past.pop();
    if (!last) return;
    save(last.sample, last.before);
    return go(last.at);
  }

  // The next sample is there at once; decisions are kept in the order in which they were made.
  function save(sample, decision) {
    if (decision) decisions[sample] = decision;
    else delete decisions[sample];
    root.dataset.saving = Number(root.dataset.saving) + 1;
    pending.set(String(sample), (pending.get(String(sample)) ?? 0) + 1);
    saving = saving.then(() => source.decide(sample, decision)).then(
      () => (note = ""),
      (error) => (note = `Not saved: ${error.message}`),
    ).then(() => {
      pending.set(String(sample), pending.get(String(sample)) - 1);
      root.dataset.saving = Number(root.dataset.saving) - 1;
      tellNote();
    });
  }

  function tellNote() {
    const place = root.querySelector("[role=status]");
    if (place) place.textContent = note;
  }

  function draw() {
    root.replaceChildren(...(source.total ? parts() : [element("p", {}, "There is nothing to review.")]));
  }

  function parts() {
    const entry = current();
    if (!entry) return [element("p", {}, "Loading …")];
    const mine = decisions[entry.sample];
    const decided = Object.keys(decisions).length;
    const said = mine && (mine.verdict === "relabel" ? `relabeled ${source.classes?.[mine.label] ?? mine.label}` : VERDICTS[mine.verdict]);
    const button = ({ key, verdict, title, does }) =>
      element(
        "button",
        { type: "button", class: `lw-button${mine?.verdict === verdict ? " lw-chosen" : ""}`, "data-verdict": verdict, title: does, disabled: verdict === "relabel" && !isOther(entry), onclick: () => decideOrAsk(verdict) },
        verdict === "relabel" && isOther(entry) ? `${title} ${entry.suggested_label_name}${entry.doubtful ? " …" : ""}` : title,
        element("kbd", {}, key),
      );
    const told = entry.doubtful ? ", perhaps " : ", looks like ";
    const question = isOther(entry)
      ? element("p", { class: "lw-question", "data-doubtful": entry.doubtful }, "Labeled ", element("strong", {}, entry.label_name), told, element("strong", { class: "lw-accent" }, entry.suggested_label_name))
      : element("p", { class: "lw-question" }, entry.label_name == null ? entry.name : `Labeled ${entry.label_name}${entry.suggested_label == null ? "" : ", and looks like it"}`);
    const facts = [entry.name, entry.label_suspicion != null && `suspicion ${entry.label_suspicion.toFixed(2)}`, entry.judge, entry.chance_wrong != null && `${chance(entry.chance_wrong)} likely wrong`, said && `you said: ${said}`];
    return [
      element(
        "div",
        { class: "lw-bar" },
        element("span", { class: "lw-quiet", "data-decided": decided }, `${at < source.flagged ? `${at + 1} of ${source.flagged.toLocaleString("en")} that look wrong` : `${at + 1} of ${source.total.toLocaleString("en")}, not flagged`} · ${decided} decided`),
        element("progress", { max: Math.max(1, source.flagged), value: Math.min(decided, source.flagged), "aria-label": "decided" }),
      ),
      element(
        "div",
        { class: "lw-card", "data-sample": entry.sample },
        element("div", { class: "lw-shown" }, renderPicture(entry.picture, entry.name, "large")),
        element(
          "div",
          {},
          question,
          element("p", { class: "lw-quiet" }, facts.filter(Boolean).join(" · ")),
          element("div", { class: "lw-buttons" }, ...REVIEW_KEYS.filter(({ verdict }) => verdict).map(button)),
          picker(entry),
          element("p", { class: "lw-head" }, "Most similar samples"),
          element("div", { class: "lw-tiles" }, ...entry.neighbors.map((near) => neighborTile(near, near.label === entry.label))),
        ),
      ),
      element(
        "div",
        { class: "lw-bar" },
        element("button", { type: "button", class: "lw-button", onclick: () => go(at - 1) }, "previous", element("kbd", {}, "←")),
        element("button", { type: "button", class: "lw-button", onclick: () => go(at + 1) }, "next", element("kbd", {}, "→")),
        element("button", { type: "button", class: "lw-button", id: "lw-undo", disabled: !past.length, onclick: undo }, "undo", element("kbd", {}, "z")),
        element("button", { type: "button", class: "lw-button", id: "lw-keys", onclick: showKeys }, "keys", element("kbd", {}, "?")),
        element("span", { class: "lw-accent", role: "status" }, note),
      ),
    ];
  }

  function picker(entry) {
    if (!source.classes) return null;
    const list = element("datalist", { id: "lw-classes" }, ...source.classes.map((name) => element("option", { value: name })));
    let taken = false; // a field that is taken off the page may say it again
    const choose = (event) => {
      const name = event.target.value;
      const number = isOther(entry) && name === entry.suggested_label_name ? entry.suggested_label : source.classes.indexOf(name);
      if (number < 0 || taken || entry !== current()) return;
      taken = true;
      decide("relabel", number);
    };
    const onEnter = (event) => event.key === "Enter" && !event.isComposing && choose(event); // no change is reported of what was put there
    return element("label", { class: "lw-quiet" }, "or type its class ", element("input", { type: "text", class: "lw-field", list: "lw-classes", size: 16, onchange: choose, onkeydown: onEnter }), list);
  }

  function showKeys() {
    let box = root.parentNode.querySelector("dialog.review-keys");
    if (!box) root.after((box = makeKeysWindow(element))); // beside what is drawn again
    box.showModal();
  }

  const listener = (event) => {
    const isUndo = event.key === "z" && (event.ctrlKey || event.metaKey) && !event.shiftKey;
    if (((event.ctrlKey || event.metaKey) && !isUndo) || event.altKey || event.isComposing || !root.isConnected || root.offsetParent === null) return;
    if (event.target.closest?.("input, select, textarea, dialog[open]")) return;
    const acts = { ArrowRight: () => go(at + 1), ArrowLeft: () => go(at - 1), z: undo, c: () => root.querySelector(".lw-field")?.focus(), "?": showKeys };
    const verdict = VERDICT_OF_KEY[event.key];
    const act = acts[event.key] ?? (verdict && (() => decideOrAsk(verdict)));
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  };
  root.tabIndex = 0;
  root.dataset.saving = 0;
  (source.everywhere ? document : root).addEventListener("keydown", listener);
  draw();
  const first = async () => {
    let place = 0;
    await fill(0);
    while (place < source.flagged - 1) {
      await fill(place);
      if (!entries[place] || !decisions[entries[place].sample]) break;
      place += 1;
    }
    await go(place);
  };
  first();
  return {
    say(text) {
      note = text;
      tellNote();
    },
    stop: () => (source.everywhere ? document : root).removeEventListener("keydown", listener),
    update(changed) {
      const settled = (sample) => !pending.get(sample); // what was decided here since is newer
      for (const sample of Object.keys(decisions)) if (!changed[sample] && settled(sample)) delete decisions[sample];
      for (const [sample, decision] of Object.entries(changed)) if (settled(sample)) decisions[sample] = decision;
      draw();
    },
  };
}

// --- the map ---------------------------------------------------------------------------------------------------------

// Okabe and Ito's colors, which color-blind readers can tell apart.
export const COLORS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d1f", "#7f7f7f", "#b8a800", "#6a3d9a"];

// source: { x, y: numbers, groups: class numbers or null, names: of the classes, select(samples) }
export function mountMap(root, source) {
  const canvas = element("canvas", { class: "lw-map", tabindex: "0", role: "img", "aria-label": "Map of all samples: points close together are treated alike. Drag to circle samples." });
  const told = element("p", { class: "lw-quiet", role: "status" }, "Drag to circle samples; double-click to let go.");
  const legend = element("div", { class: "lw-legend" });
  root.append(canvas, legend, told);
  const n = source.x.length;
  const bounds = [extent(source.x), extent(source.y)];
  let chosen = null;
  let path = [];
  const places = () => {
    const { width, height } = canvas;
    const margin = 12 * devicePixelRatio;
    const scale = (value, [low, high], size) => margin + ((value - low) / (high - low || 1)) * (size - 2 * margin);
    return { px: (i) => scale(source.x[i], bounds[0], width), py: (i) => height - scale(source.y[i], bounds[1], height) };
  };

  function draw() {
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio));
    canvas.height = Math.max(1, Math.round(canvas.clientHeight * devicePixelRatio));
    const pen = canvas.getContext("2d");
    const { px, py } = places();
    const size = (n > 20000 ? 1.6 : n > 3000 ? 2.4 : 4.5) * devicePixelRatio;
    for (const faded of [true, false]) {
      pen.globalAlpha = faded ? 0.15 : n > 20000 ? 0.6 : 0.85;
      for (let i = 0; i < n; i++) {
        if ((chosen !== null && !chosen.has(i)) !== faded) continue;
        pen.fillStyle = COLORS[(source.groups ? source.groups[i] : 0) % COLORS.length];
        pen.fillRect(px(i) - size / 2, py(i) - size / 2, size, size);
      }
    }
    if (path.length > 1) {
      pen.globalAlpha = 1;
      pen.strokeStyle = getComputedStyle(canvas).color;
      pen.lineWidth = 1.5 * devicePixelRatio;
      pen.beginPath();
      path.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.closePath();
      pen.stroke();
    }
  }

  function select(samples) {
    chosen = samples && new Set(samples);
    told.textContent = samples ? `${samples.length.toLocaleString("en")} ${samples.length === 1 ? "sample" : "samples"} circled.` : "Drag to circle samples; double-click to let go.";
    draw();
    source.select(samples ?? []);
  }

  const where = (event) => [event.offsetX * devicePixelRatio, event.offsetY * devicePixelRatio];
  canvas.addEventListener("pointerdown", (event) => {
    path = [where(event)];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!path.length) return;
    path.push(where(event));
    if (path.length % 3 === 0) draw();
  });
  canvas.addEventListener("pointerup", () => {
    const lasso = path;
    path = [];
    if (lasso.length < 4) return draw();
    const { px, py } = places();
    const found = [];
    for (let i = 0; i < n; i++) if (isInside(px(i), py(i), lasso)) found.push(i);
    select(found.length ? found : null);
  });
  canvas.addEventListener("dblclick", () => select(null));
  canvas.addEventListener("keydown", (event) => event.key === "Escape" && select(null));
  if (source.names && source.names.length <= 20) {
    legend.append(...source.names.map((name, i) => element("span", {}, element("i", { "data-color": i % COLORS.length }), name)));
    legend.querySelectorAll("i").forEach((mark) => (mark.style.background = COLORS[Number(mark.dataset.color)]));
  }
  const observer = new ResizeObserver(draw);
  observer.observe(canvas);
  draw();
  return { stop: () => observer.disconnect(), select };
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

export function isInside(x, y, polygon) {
  let inside = false;
  for (let i = 0, j = polygon.length - 1; i < polygon.length; j = i++) {
    const [xi, yi] = polygon[i];
    const [xj, yj] = polygon[j];
    if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) inside = !inside;
  }
  return inside;
}
