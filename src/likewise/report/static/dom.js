// Elements, pictures, colors. Text is always set as text, never as HTML.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") && value != null) made.setAttribute(name, String(value));
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

const button = (text, onclick, attributes = {}) => element("button", { type: "button", onclick, ...attributes }, text);

const SVG = "http://www.w3.org/2000/svg";

function drawing(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A sample as a person sees it, at one of two sizes.
function picture(data, sample, large = false) {
  const { pictures } = data;
  const size = large ? "large" : "small";
  if (!pictures.has(sample)) return laterPicture(data, sample, size);
  const kind = pictures.kind(sample);
  const content = kind === "image" ? pictures.address(sample) : kind === "text" ? pictures.text(sample) : JSON.parse(pictures.text(sample));
  return drawPicture(kind, content, size, sample);
}

// Its number; and what is to be seen of it once a server has sent that.
function laterPicture(data, sample, size) {
  const reason = data.pictureSource ? "No picture of this sample is known." : "The report keeps pictures of some samples only, the most telling first; of this one it keeps none.";
  const made = element("span", { class: `picture none ${size}`, title: reason }, element("span", {}, `#${sample}`), element("small", {}, "no picture kept"));
  if (data.pictureSource) data.pictures.fetch(data.pictureSource, sample).then((found) => found && made.replaceWith(drawPicture(found.kind, found.content, size, sample)));
  return made;
}

function drawPicture(kind, content, size, sample) {
  if (kind === "image") return element("img", { class: `picture ${size}`, src: content, alt: `sample ${sample}` });
  if (kind === "text") return element("span", { class: `picture text ${size}` }, content);
  if (kind === "signal") return signal(content, size, sample);
  const rows = Object.entries(content).map(([name, value]) => element("span", { class: "field" }, element("span", {}, name), element("span", {}, String(value))));
  return element("span", { class: `picture row ${size}` }, ...(size === "large" ? rows : rows.slice(0, 4)));
}

function signal(values, size, sample) {
  const known = values.filter((v) => v != null);
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = values.map((v, i) => v == null ? "" : `${(100 * i) / (values.length - 1 || 1)},${38 - (36 * (v - low)) / span}`).join(" ");
  const line = drawing("polyline", { points, fill: "none", stroke: "currentColor", "stroke-width": 1, "vector-effect": "non-scaling-stroke" });
  return drawing("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: `picture signal ${size}`, role: "img", "aria-label": `signal of sample ${sample}` }, line);
}

// What stands under a sample's picture.
function captionOf(data, sample) {
  const group = groupColumn(data);
  if (group) return shown(data, group, sample);
  if (data.columns.label) return shown(data, "label", sample);
  return data.columns.name ? shown(data, "name", sample) : `#${sample}`;
}

// An excerpt whose tokens are marked by what they contribute to a similarity: the strongest passage is underlined too.
const AGAINST = 0.02; // of the largest contribution: less is nothing to look at
function markedText({ marks, slice, length, start, end, similarity: whole }) {
  const most = Math.max(...marks.map(({ contribution }) => contribution), 1e-9);
  const made = element("span", { class: "picture text marked" });
  const passage = element("u", { class: "strongest" });
  let at = 0;
  const upTo = (place) => {
    const before = Math.min(Math.max(at, start), place);
    const after = Math.max(Math.min(place, end), before);
    made.append(slice(at, before));
    passage.append(slice(before, after));
    if (place >= start && start < end && !passage.parentNode) made.append(passage);
    made.append(slice(after, place));
    at = place;
  };
  for (const mark of marks) {
    upTo(mark.start);
    const against = mark.contribution < -AGAINST * most;
    const inside = mark.start >= start && mark.start < end;
    (inside ? passage : made).append(element("mark", { class: against ? "against" : null, title: whole > 0 ? `${percentPoints(mark.contribution / whole)} of the similarity` : null, style: `--strength: ${(Math.max(0, mark.contribution) / most).toFixed(3)}` }, slice(mark.start, mark.end)));
    at = mark.end;
  }
  upTo(length);
  return made;
}

const percentPoints = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.1 ? 1 : 0).replace("-", "−")}\u00a0%`;

// What a marked excerpt says, in a line: for the screen reader too.
function passageNote(found) {
  if (found.start === found.end || !(found.similarity > 0)) return "no token speaks for this similarity";
  return `${percentPoints(found.share)} of it: “${found.passage.trim()}”`;
}

// For which pairs passages are marked, and what marks mean; null where a run has none.
function passageLegend(data, sample = null) {
  const { passages } = data;
  if (!passages) return null;
  const where = `Passages are marked for the ${counted(passages.samples, "text")} that ${passages.samples === 1 ? "is" : "are"} most novel, with the ${passages.perSample} nearest of each`;
  if (sample != null && !passages.has(sample)) return element("p", { class: "quiet passage-legend" }, `${where}: not for this one. likewise analyze --passages sets how many.`);
  return element("p", { class: "quiet passage-legend" }, element("span", { class: "passage-scale", "aria-hidden": "true" }, ...[0.1, 0.4, 0.7, 1].map((strength) => element("mark", { style: `--strength: ${strength}` }, "ab"))), " Marked: what each token of a neighbor contributes to the ", term(data, "passage", "plain similarity"), " of the two texts; the stronger the color, the larger its share, up to the largest in that text. Underlined: the strongest passage. ", element("mark", { class: "against", style: "--strength: 0" }, "Dotted"), `: tokens that speak against it. ${where}; neighbors of these texts are by exact gradients.`);
}

// A button with a sample's picture, its label, and a line more; with the passages that its similarity to another rests on.
function tile(state, sample, note, mark = "", passages = null) {
  const { data } = state;
  const label = captionOf(data, sample);
  if (passages) {
    const told = passageNote(passages);
    return element(
      "button",
      { type: "button", class: `tile passages ${mark}`, "data-sample": sample, "aria-label": `${nameOf(data, sample)}, ${label}, ${note}, plain similarity ${passages.similarity.toFixed(2)}, ${told}`, title: nameOf(data, sample), onclick: () => state.open(sample) },
      markedText(passages),
      element("span", { class: "tile-label" }, label),
      element("span", { class: "tile-note" }, `${note} · plain ${passages.similarity.toFixed(2)} (exact), ${told}`),
    );
  }
  return element(
    "button",
    { type: "button", class: `tile ${mark}`, "data-sample": sample, "aria-label": `${nameOf(data, sample)}, ${label}${note == null ? "" : `, ${note}`}`, title: nameOf(data, sample), onclick: () => state.open(sample) },
    picture(data, sample),
    element("span", { class: "tile-label" }, label),
    note == null ? null : element("span", { class: "tile-note" }, note),
  );
}

function neighborTiles(state, sample, most = Infinity) {
  const { data } = state;
  const group = groupColumn(data) && data.columns[groupColumn(data)];
  return Array.from({ length: Math.min(data.k, most) }, (_, rank) => {
    const other = data.neighbors[sample * data.k + rank];
    const mark = !group ? "" : group.values[other] === group.values[sample] ? "same" : "other";
    return tile(state, other, similarity(data, sample, rank).toFixed(2), mark, data.passages?.get(sample, other));
  });
}

// What frames and numbers of neighbors' tiles mean; on small screens only the first are shown.
const NARROW_TILES = 4;
function neighborLegend(data, most = Infinity) {
  const group = groupColumn(data);
  if (!data.k) return null;
  const frame = (kind, color) => element("span", { class: "frame-key" }, element("span", { class: `sample-frame ${kind}` }), ` ${color}:`);
  const frames = group && [frame("same", "blue"), ` same ${group} as this sample. `, frame("other", "orange, dashed"), ` another ${group}. `];
  const count = (size, tiles) => (tiles < data.k ? element("span", { class: `shown-count ${size}` }, ` ${tiles} of ${data.k} shown.`) : null);
  return element("p", { class: "quiet tiles-legend" }, ...(frames || []), "The number is the similarity (1: the same).", count("wide", Math.min(most, data.k)), most < Infinity ? count("narrow", Math.min(NARROW_TILES, data.k)) : null);
}

// A word that is explained: a line on hover and focus, a link to the words at the end of the page.
function term(data, name, text = data.words[name].title) {
  return element("a", { class: "term", href: `#word-${name}`, "data-word": name }, text);
}

function makeTips(data) {
  const tip = document.getElementById("tip");
  let about = null;
  const place = () => {
    const { left, bottom, top } = about.getBoundingClientRect();
    const below = bottom + tip.offsetHeight + 12 < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${below ? bottom + 6 : top - tip.offsetHeight - 6}px`;
  };
  const show = (event) => {
    const word = event.target.closest?.("[data-word]");
    if (!word || !data.words[word.dataset.word]) return;
    about = word;
    tip.textContent = data.words[word.dataset.word].meaning;
    tip.hidden = false;
    word.setAttribute("aria-describedby", "tip");
    place();
  };
  const hide = () => {
    tip.hidden = true;
    about = null;
  };
  // Focus may scroll its word into view: the line stays beside it.
  const move = () => about && (about === document.activeElement ? place() : hide());
  for (const event of ["pointerover", "focusin"]) document.addEventListener(event, show);
  for (const event of ["pointerout", "focusout"]) document.addEventListener(event, hide);
  document.addEventListener("scroll", move, { passive: true });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
}

// Okabe and Ito's colors with four more, told apart by color-blind readers; class names stand on the map beside them.
const COLORS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d1f", "#7f7f7f", "#b8a800", "#6a3d9a"];
const rgbOf = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const colorOf = (i) => COLORS[i % COLORS.length];

// Numbers: from the color of the paper to a strong one, ever darker on white and ever lighter on black.
const RAMPS = [["#d5dae0", "#e6b98a", "#cf5a13", "#5b1a02"], ["#3b434b", "#8a5a34", "#f0874a", "#ffe9d9"]].map((ramp) => ramp.map(rgbOf));
function rampAt(share) {
  const ramp = RAMPS[isDark() ? 1 : 0];
  const at = Math.max(0, Math.min(1, share)) * (ramp.length - 1);
  const low = Math.min(ramp.length - 2, Math.floor(at));
  return ramp[low].map((value, i) => Math.round(value + (at - low) * (ramp[low + 1][i] - value)));
}

const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => styleOf("--dark") === "1";
