// Elements, pictures, colors. Text is always set as text, never as HTML.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

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
  if (!pictures.has(sample)) return element("span", { class: `picture none ${size}`, title: "no picture kept" }, `#${sample}`);
  const kind = pictures.kind(sample);
  if (kind === "image") {
    return element("img", { class: `picture ${size}`, src: pictures.address(sample), alt: `sample ${sample}` });
  }
  if (kind === "text") return element("span", { class: `picture text ${size}` }, pictures.text(sample));
  const content = JSON.parse(pictures.text(sample));
  if (kind === "signal") return signal(content, size);
  const rows = Object.entries(content).map(([name, value]) =>
    element("tr", {}, element("th", {}, name), element("td", {}, String(value))),
  );
  return element("span", { class: `picture row ${size}` }, element("table", {}, ...(large ? rows : rows.slice(0, 4))));
}

function signal(values, size) {
  const known = values.filter((v) => v != null);
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = values.map((v, i) => v == null ? "" : `${(100 * i) / (values.length - 1 || 1)},${38 - (36 * (v - low)) / span}`).join(" ");
  const line = drawing("polyline", { points, fill: "none", stroke: "currentColor", "stroke-width": 1, "vector-effect": "non-scaling-stroke" });
  const drawn = drawing("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: `picture signal ${size}`, role: "img" }, line);
  return drawn;
}

// A button with a sample's picture, its label, and a line more.
function tile(state, sample, note, mark = "") {
  const { data } = state;
  const label = data.columns.label ? shown(data, "label", sample) : data.columns.name ? shown(data, "name", sample) : `#${sample}`;
  return element(
    "button",
    { type: "button", class: `tile ${mark}`, "data-sample": sample, title: `open sample ${sample}`, onclick: () => state.open(sample) },
    picture(data, sample),
    element("span", { class: "tile-label" }, label),
    note == null ? null : element("span", { class: "tile-note" }, note),
  );
}

// Okabe and Ito's colors, told apart by color-blind readers, and shapes beside them.
const COLORS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c6d1f", "#7f7f7f", "#b8a800", "#6a3d9a"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon", "triangle-down", "pentagon"];
const colorOf = (i) => COLORS[i % COLORS.length];
const symbolOf = (i, n = 0) => n > 20000 ? "circle" : SYMBOLS[(i + Math.floor(i / COLORS.length)) % SYMBOLS.length];

const isDark = () => getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
const styleOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function plotLayout(extra) {
  const ink = styleOf("--ink");
  const line = styleOf("--line");
  const axis = { color: ink, gridcolor: line, zerolinecolor: line, linecolor: line };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: "inherit" },
    margin: { l: 46, r: 8, t: 8, b: 40 },
    hovermode: "closest",
    ...extra,
    xaxis: { ...axis, ...extra.xaxis },
    yaxis: { ...axis, ...extra.yaxis },
  };
}

const PLOT_OPTIONS = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["toImage", "autoScale2d"], scrollZoom: false };

// Plotly reads some HTML in texts: what a user wrote must stay text.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
