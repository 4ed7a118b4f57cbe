// Points on a canvas, for a hundred thousand of them: zoom, move, circle, hover; names, pictures and density on top.

const AS_DENSITY = 20000; // more points in view than this are drawn as shades
const AS_PICTURES = 160; // fewer are drawn as pictures, where there are any
const PICTURE_SIDE = 38;
const NEAR = 14; // pixels within which a point is meant

// options: label, axes ({ x, y } of { title, log, min, max } or null), square (one scale for both), onCircle, onOpen, describe
function makeScatter(place, data, options) {
  const canvas = element("canvas", { role: "img", "aria-label": options.label });
  const note = element("div", { class: "hover", hidden: true });
  const scatter = {
    place, canvas, data, options, x: null, y: null,
    groups: new Uint8Array(data.n), palette: [[128, 128, 128]], names: [],
    selected: null, ring: null, linked: [],
    view: null, zoom: 1, count: null, width: 0, height: 0, lasso: null, images: new Map(), waiting: false,
  };
  scatter.mode = matchMedia("(pointer: coarse)").matches ? "look" : "circle";
  scatter.redraw = () => {
    if (scatter.waiting) return;
    scatter.waiting = true;
    requestAnimationFrame(() => {
      scatter.waiting = false;
      drawScatter(scatter);
    });
  };
  place.replaceChildren(canvas, scatterTools(scatter), note);
  new ResizeObserver(() => fitCanvas(scatter)).observe(place);
  listen(scatter, note);
  return Object.assign(scatter, {
    setPlaces(x, y) {
      Object.assign(scatter, { x, y, view: null });
      fitCanvas(scatter);
    },
    setColors(groups, palette, names) {
      Object.assign(scatter, { groups, palette, names });
      scatter.redraw();
    },
    setSelected(samples) {
      scatter.selected = samples && new Uint8Array(data.n);
      scatter.count = samples?.length ?? null;
      samples?.forEach((i) => (scatter.selected[i] = 1));
      scatter.redraw();
    },
    setRing(sample, linked = []) {
      Object.assign(scatter, { ring: sample, linked });
      scatter.redraw();
    },
  });
}

function scatterTools(scatter) {
  const modes = [["circle", "Circle", "Drag to circle samples"], ["move", "Move", "Drag to move the view"]];
  const choose = (mode) => {
    scatter.mode = scatter.mode === mode ? "look" : mode;
    buttons.forEach((made, i) => made.setAttribute("aria-pressed", modes[i][0] === scatter.mode));
    scatter.canvas.dataset.mode = scatter.mode;
  };
  const buttons = modes.map(([mode, text, title]) => button(text, () => choose(mode), { title, "aria-pressed": scatter.mode === mode }));
  scatter.canvas.dataset.mode = scatter.mode;
  const zoom = (by) => () => zoomAt(scatter, scatter.width / 2, scatter.height / 2, by);
  return element("div", { class: "plot-tools", role: "group", "aria-label": "View" }, ...buttons, button("+", zoom(1.6), { "aria-label": "Zoom in" }), button("−", zoom(1 / 1.6), { "aria-label": "Zoom out" }), button("Reset", () => { scatter.view = null; fitCanvas(scatter); }, { title: "Show everything" }));
}

function fitCanvas(scatter) {
  const { place, canvas } = scatter;
  const ratio = Math.min(2, devicePixelRatio || 1);
  const [width, height] = [place.clientWidth, place.clientHeight];
  if (!width || !height || !scatter.x) return;
  if (canvas.width !== width * ratio || canvas.height !== height * ratio) {
    canvas.width = width * ratio;
    canvas.height = height * ratio;
  }
  const changed = scatter.width !== width || scatter.height !== height;
  Object.assign(scatter, { width, height, ratio });
  if (!scatter.view || changed) Object.assign(scatter, { view: wholeView(scatter), zoom: 1 });
  scatter.redraw();
}

const MARGIN = { l: 46, r: 14, t: 40, b: 40 }; // the buttons of the plot stand at the top

// The view shows (x - view.x) * view.kx + width / 2, and y upwards likewise; most points of a map, not its farthest.
function wholeView({ x, y, width, height, options, data }) {
  const inner = options.axes ? MARGIN : { l: 18, r: 18, t: 18, b: 18 };
  const [left, right] = options.axes?.x.min != null ? [options.axes.x.min, options.axes.x.max] : ends(x, data.n);
  const [low, high] = options.axes?.y.min != null ? [options.axes.y.min, options.axes.y.max] : ends(y, data.n);
  let kx = (width - inner.l - inner.r) / (right - left || 1);
  let ky = (height - inner.t - inner.b) / (high - low || 1);
  if (options.square) kx = ky = Math.min(kx, ky);
  return {
    x: (left + right) / 2 - (inner.l - inner.r) / 2 / kx,
    y: (low + high) / 2 + (inner.t - inner.b) / 2 / ky,
    kx,
    ky,
  };
}

function ends(values, n) {
  let [low, high] = [Infinity, -Infinity];
  for (let i = 0; i < n; i++) {
    if (values[i] < low) low = values[i];
    if (values[i] > high) high = values[i];
  }
  return Number.isFinite(low) ? [low, high] : [0, 1];
}

const screenX = (s, i) => (s.x[i] - s.view.x) * s.view.kx + s.width / 2;
const screenY = (s, i) => s.height / 2 - (s.y[i] - s.view.y) * s.view.ky;

function zoomAt(scatter, px, py, by) {
  const { view, width, height } = scatter;
  const at = { x: view.x + (px - width / 2) / view.kx, y: view.y - (py - height / 2) / view.ky };
  scatter.zoom *= by;
  view.kx *= by;
  view.ky *= by;
  view.x = at.x - (px - width / 2) / view.kx;
  view.y = at.y + (py - height / 2) / view.ky;
  scatter.redraw();
}

function drawScatter(scatter) {
  const { canvas, width, height, ratio, data, place } = scatter;
  if (!scatter.view) return;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  if (scatter.options.axes) drawAxes(context, scatter);
  const visible = [];
  for (let i = 0; i < data.n; i++) {
    const x = screenX(scatter, i);
    const y = screenY(scatter, i);
    if (x > -20 && x < width + 20 && y > -20 && y < height + 20) visible.push(i);
  }
  const dense = visible.length > AS_DENSITY;
  if (dense) drawDensity(context, scatter, visible);
  else drawPoints(context, scatter, visible);
  const pictured = scatter.options.pictures && visible.length <= AS_PICTURES ? drawPictures(context, scatter, visible) : 0;
  drawRing(context, scatter);
  if (!pictured) drawNames(context, scatter);
  drawLasso(context, scatter);
  Object.assign(place.dataset, { visible: visible.length, selected: scatter.count ?? "all", zoom: scatter.zoom.toFixed(2), drawn: pictured ? "pictures" : dense ? "density" : "points" });
}

function drawPoints(context, scatter, visible) {
  const { groups, palette, selected, ratio } = scatter;
  const size = visible.length > 6000 ? 2.2 : visible.length > 1500 ? 3 : 4.2;
  const sprites = palette.map((color) => dot(color, size, ratio));
  const half = sprites[0].width / ratio / 2;
  const side = half * 2;
  for (const chosen of selected ? [0, 1] : [1]) {
    context.globalAlpha = chosen ? 0.85 : 0.1;
    for (const i of visible) {
      if (selected && selected[i] !== chosen) continue;
      context.drawImage(sprites[groups[i]], screenX(scatter, i) - half, screenY(scatter, i) - half, side, side);
    }
  }
  context.globalAlpha = 1;
}

function dot([r, g, b], radius, ratio) {
  const made = document.createElement("canvas");
  made.width = made.height = Math.ceil((2 * radius + 2) * ratio);
  const context = made.getContext("2d");
  context.fillStyle = `rgb(${r},${g},${b})`;
  context.beginPath();
  context.arc(made.width / 2, made.width / 2, radius * ratio, 0, 7);
  context.fill();
  return made;
}

// How many samples are at a place, as strength, and what they are, as the mean of their colors.
function drawDensity(context, scatter, visible) {
  const { groups, palette, selected, width, height } = scatter;
  const [w, h] = [Math.ceil(width), Math.ceil(height)];
  const sums = new Float32Array(w * h * 4);
  for (const i of visible) {
    if (selected && !selected[i]) continue;
    const x = Math.round(screenX(scatter, i));
    const y = Math.round(screenY(scatter, i));
    if (x < 1 || y < 1 || x >= w - 1 || y >= h - 1) continue;
    const color = palette[groups[i]];
    for (const [at, weight] of [[y * w + x, 1], [y * w + x - 1, 0.5], [y * w + x + 1, 0.5], [(y - 1) * w + x, 0.5], [(y + 1) * w + x, 0.5]]) {
      sums[at * 4] += weight * color[0];
      sums[at * 4 + 1] += weight * color[1];
      sums[at * 4 + 2] += weight * color[2];
      sums[at * 4 + 3] += weight;
    }
  }
  const image = new ImageData(w, h);
  let most = 1;
  for (let at = 3; at < sums.length; at += 4) if (sums[at] > most) most = sums[at];
  const scale = 215 / Math.log1p(most);
  for (let at = 0; at < sums.length; at += 4) {
    const count = sums[at + 3];
    if (!count) continue;
    image.data[at] = sums[at] / count;
    image.data[at + 1] = sums[at + 1] / count;
    image.data[at + 2] = sums[at + 2] / count;
    image.data[at + 3] = 40 + scale * Math.log1p(count);
  }
  const layer = new OffscreenCanvas(w, h);
  layer.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(layer, 0, 0);
}

function drawPictures(context, scatter, visible) {
  const { data, images, palette, groups } = scatter;
  const taken = new Set();
  let count = 0;
  for (const i of visible) {
    if (!data.pictures.has(i) || data.pictures.kind(i) !== "image") continue;
    const [x, y] = [screenX(scatter, i), screenY(scatter, i)];
    const cell = `${Math.floor(x / PICTURE_SIDE)},${Math.floor(y / PICTURE_SIDE)}`;
    if (taken.has(cell)) continue;
    taken.add(cell);
    if (!images.has(i)) {
      const image = new Image();
      image.onload = scatter.redraw;
      image.src = data.pictures.address(i);
      images.set(i, image);
    }
    const image = images.get(i);
    if (!image.complete || !image.naturalWidth) continue;
    const half = PICTURE_SIDE / 2;
    context.imageSmoothingEnabled = image.naturalWidth > PICTURE_SIDE;
    context.drawImage(image, x - half, y - half, PICTURE_SIDE, PICTURE_SIDE);
    context.strokeStyle = `rgb(${palette[groups[i]]})`;
    context.lineWidth = 2;
    context.strokeRect(x - half, y - half, PICTURE_SIDE, PICTURE_SIDE);
    count++;
  }
  context.imageSmoothingEnabled = true;
  return count;
}

function drawRing(context, scatter) {
  const { ring, linked } = scatter;
  if (ring == null) return;
  const [x, y] = [screenX(scatter, ring), screenY(scatter, ring)];
  context.strokeStyle = styleOf("--ink");
  context.globalAlpha = 0.45;
  context.lineWidth = 1;
  context.beginPath();
  for (const other of linked) {
    context.moveTo(x, y);
    context.lineTo(screenX(scatter, other), screenY(scatter, other));
  }
  context.stroke();
  context.globalAlpha = 1;
  for (const [width, color] of [[5, styleOf("--panel")], [2.5, styleOf("--signal")]]) {
    context.lineWidth = width;
    context.strokeStyle = color;
    context.beginPath();
    context.arc(x, y, 9, 0, 7);
    context.stroke();
  }
}

// Names where their groups are thickest; of two that would overlap the larger group's stays.
function drawNames(context, scatter) {
  const { names, width, height } = scatter;
  context.font = `600 12.5px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineJoin = "round";
  context.lineWidth = 4;
  const boxes = [];
  for (const { text, x, y, color } of names) {
    const px = (x - scatter.view.x) * scatter.view.kx + width / 2;
    const py = height / 2 - (y - scatter.view.y) * scatter.view.ky;
    if (px < 0 || px > width || py < 0 || py > height) continue;
    const cut = text.length > 24 ? `${text.slice(0, 23)}…` : text;
    const half = context.measureText(cut).width / 2 + 3;
    const at = Math.max(half, Math.min(width - half, px));
    const free = [0, 15, -15, 30, -30].find((by) => !boxes.some((box) => Math.abs(box.x - at) < box.half + half && Math.abs(box.y - py - by) < 15));
    if (free == null) continue;
    boxes.push({ x: at, y: py + free, half });
    context.strokeStyle = styleOf("--panel");
    context.strokeText(cut, at, py + free);
    context.fillStyle = styleOf("--ink");
    context.fillText(cut, at, py + free);
    context.fillStyle = `rgb(${color})`;
    context.fillRect(at - half + 3, py + free + 8, 2 * half - 6, 2);
  }
}

function drawLasso(context, { lasso }) {
  if (!lasso || lasso.length < 2) return;
  context.strokeStyle = styleOf("--accent");
  context.lineWidth = 1.5;
  context.setLineDash([5, 4]);
  context.beginPath();
  lasso.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
  context.stroke();
  context.setLineDash([]);
  context.globalAlpha = 0.08;
  context.fillStyle = styleOf("--accent");
  context.fill();
  context.globalAlpha = 1;
}

// Round numbers between two ends; of a logarithmic axis powers of ten, with 2 and 5 between if there is room.
function ticksOf(low, high, log) {
  if (!log) {
    const span = high - low;
    const step = [1, 2, 5, 10].map((by) => by * 10 ** Math.floor(Math.log10(span / 5))).find((by) => span / by <= 6);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9; at++) found.push({ at: at * step, text: plainNumber(at * step) });
    return found;
  }
  const decades = high - low;
  const factors = decades > 2.5 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / 7));
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    if (power % every) continue;
    for (const factor of factors) {
      const at = power + Math.log10(factor);
      if (at >= low && at <= high) found.push({ at, text: plainNumber(factor * 10 ** power) });
    }
  }
  return found;
}

function plainNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size && size < 1e-3) return value.toExponential(0);
  return String(+value.toPrecision(4));
}

function drawAxes(context, scatter) {
  const { view, width, height, options } = scatter;
  const { axes } = options;
  const left = view.x + (MARGIN.l - width / 2) / view.kx;
  const right = view.x + (width - MARGIN.r - width / 2) / view.kx;
  const low = view.y - (height - MARGIN.b - height / 2) / view.ky;
  const high = view.y - (MARGIN.t - height / 2) / view.ky;
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = styleOf("--quiet");
  context.strokeStyle = styleOf("--line");
  context.lineWidth = 1;
  context.textBaseline = "top";
  context.textAlign = "center";
  scatter.place.dataset.ticks = "";
  for (const { at, text } of ticksOf(left, right, axes.x.log)) {
    const x = Math.round((at - view.x) * view.kx + width / 2) + 0.5;
    context.beginPath();
    context.moveTo(x, MARGIN.t);
    context.lineTo(x, height - MARGIN.b);
    context.stroke();
    context.fillText(text, x, height - MARGIN.b + 5);
    scatter.place.dataset.ticks += `${text} `;
  }
  context.fillText(axes.x.title, (MARGIN.l + width - MARGIN.r) / 2, height - 15);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const { at, text } of ticksOf(low, high, axes.y.log)) {
    const y = Math.round(height / 2 - (at - view.y) * view.ky) + 0.5;
    context.beginPath();
    context.moveTo(MARGIN.l, y);
    context.lineTo(width - MARGIN.r, y);
    context.stroke();
    context.fillText(text, MARGIN.l - 6, y);
  }
  context.save();
  context.translate(11, (MARGIN.t + height - MARGIN.b) / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(axes.y.title, 0, 0);
  context.restore();
}

function nearestPoint(scatter, px, py) {
  let [best, gap] = [null, NEAR * NEAR];
  const { x, y, view, width, height, data } = scatter;
  for (let i = 0; i < data.n; i++) {
    const dx = (x[i] - view.x) * view.kx + width / 2 - px;
    const dy = height / 2 - (y[i] - view.y) * view.ky - py;
    const square = dx * dx + dy * dy;
    if (square < gap) [best, gap] = [i, square];
  }
  return best;
}

function inside(polygon, px, py) {
  let odd = false;
  for (let i = 0, j = polygon.length - 1; i < polygon.length; j = i++) {
    const [xi, yi] = polygon[i];
    const [xj, yj] = polygon[j];
    if (yi > py !== yj > py && px < ((xj - xi) * (py - yi)) / (yj - yi) + xi) odd = !odd;
  }
  return odd;
}

function circled(scatter) {
  const polygon = scatter.lasso;
  const found = [];
  for (let i = 0; i < scatter.data.n; i++) if (inside(polygon, screenX(scatter, i), screenY(scatter, i))) found.push(i);
  return found;
}

function listen(scatter, note) {
  const { canvas, options } = scatter;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  let pressed = null;
  let moved = false;
  const hover = (event) => {
    if (!scatter.view) return;
    const [px, py] = at(event);
    const sample = nearestPoint(scatter, px, py);
    note.hidden = sample == null;
    canvas.style.cursor = sample == null ? "" : "pointer";
    if (sample == null) return;
    if (Number(note.dataset.sample) !== sample || !note.childElementCount) {
      note.dataset.sample = sample;
      note.replaceChildren(picture(scatter.data, sample), element("div", {}, ...options.describe(sample).map((line) => element("div", {}, line))));
    }
    note.style.left = `${Math.min(px + 14, scatter.width - note.offsetWidth - 4)}px`;
    note.style.top = `${py + 18 + note.offsetHeight > scatter.height ? py - note.offsetHeight - 10 : py + 18}px`;
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pressed = at(event);
    moved = false;
    if (scatter.mode === "look") return;
    canvas.setPointerCapture(event.pointerId);
    if (scatter.mode === "circle") scatter.lasso = [pressed];
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pressed || scatter.mode === "look") return hover(event);
    const [px, py] = at(event);
    if (Math.hypot(px - pressed[0], py - pressed[1]) > 4) moved = true;
    note.hidden = true;
    if (scatter.mode === "circle") scatter.lasso?.push([px, py]);
    else if (moved) {
      scatter.view.x -= (px - pressed[0]) / scatter.view.kx;
      scatter.view.y += (py - pressed[1]) / scatter.view.ky;
      pressed = [px, py];
    }
    scatter.redraw();
  });
  const release = (event) => {
    if (!pressed) return;
    const [px, py] = at(event);
    pressed = null;
    const samples = moved && scatter.lasso ? circled(scatter) : [];
    scatter.lasso = null;
    scatter.redraw();
    if (samples.length) options.onCircle(samples);
    else if (!moved && event.type === "pointerup") {
      const sample = nearestPoint(scatter, px, py);
      if (sample != null) options.onOpen(sample);
    }
  };
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, release);
  canvas.addEventListener("pointerleave", () => (note.hidden = true));
  canvas.addEventListener("dblclick", () => options.onCircle(null));
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && scatter.mode !== "move") return; // else the page could not be scrolled past the plot
      event.preventDefault();
      zoomAt(scatter, ...at(event), Math.exp(-event.deltaY / 300));
    },
    { passive: false },
  );
}
