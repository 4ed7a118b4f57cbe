// The data of the page: a gzipped blob of a JSON header and typed arrays, see payload.py. It is inside the page, or
// the page says from where on its own origin to fetch it.

const TYPES = { f4: Float32Array, i4: Int32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array };

async function readData(element) {
  const stream = (element.dataset.source ? (await fetched(element.dataset.source)).body : embedded(element.textContent)).pipeThrough(new DecompressionStream("gzip"));
  return unpack(await new Response(stream).arrayBuffer());
}

async function fetched(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address} answered ${answer.status}`);
  return answer;
}

function embedded(text) {
  const letters = atob(text.trim());
  const zipped = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) zipped[i] = letters.charCodeAt(i);
  return new Blob([zipped]).stream();
}

function unpack(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const start = Math.ceil((4 + size) / 8) * 8;
  const array = ({ type, at, bytes }) => {
    const Type = TYPES[type];
    return new Type(buffer, start + at, bytes / Type.BYTES_PER_ELEMENT);
  };
  const columns = Object.create(null); // a column may be called __proto__
  for (const [name, where] of Object.entries(header.columns)) {
    columns[name] = { kind: where.kind, texts: where.texts, values: array(where) };
  }
  const { samples, kinds, ends, content } = header.pictures;
  return {
    ...header,
    words: Object.assign(Object.create(null), header.words),
    statuses: Object.assign(Object.create(null), header.statuses),
    columns,
    neighbors: array(header.neighbors),
    doubtful: array(header.doubtful),
    similarities: array(header.similarities),
    counts: array(header.counts),
    duplicates: header.duplicates && Object.fromEntries(Object.entries(header.duplicates).map(([name, where]) => [name, array(where)])),
    directions: header.directions && header.directions.map(array),
    passages: header.passages && readPassages(header.passages, array, header.n),
    pictures: readPictures(array(samples), kinds, array(ends), new Uint8Array(buffer, start + content.at, content.bytes)),
  };
}

// Excerpts of neighbors with what their tokens contribute to the similarity. Places count characters, not UTF-16 units.
function readPassages(header, array, n) {
  const part = Object.fromEntries(["sample", "neighbor", "similarity", "unshown", "passage_start", "passage_end", "markEnds", "starts", "ends", "contributions"].map((name) => [name, array(header[name])]));
  const places = new Map();
  part.sample.forEach((sample, i) => places.set(sample * n + part.neighbor[i], i));
  const samples = new Set(part.sample);
  return {
    samples: header.samples,
    perSample: header.perSample,
    has: (sample) => samples.has(sample),
    get(sample, neighbor) {
      const i = places.get(sample * n + neighbor);
      if (i == null) return null;
      const characters = Array.from(header.texts[i]);
      const slice = (start, end) => characters.slice(start, end).join("");
      const [first, last] = [i ? part.markEnds[i - 1] : 0, part.markEnds[i]];
      const marks = Array.from({ length: last - first }, (_, j) => ({ start: part.starts[first + j], end: part.ends[first + j], contribution: part.contributions[first + j] }));
      const [start, end] = [part.passage_start[i], part.passage_end[i]];
      const inside = marks.filter((mark) => mark.start >= start && mark.start < end).reduce((sum, mark) => sum + mark.contribution, 0);
      return { marks, slice, length: characters.length, start, end, passage: slice(start, end), share: inside / part.similarity[i], similarity: part.similarity[i], unshown: part.unshown[i] };
    },
  };
}

function readPictures(samples, kinds, ends, content) {
  const places = new Map();
  samples.forEach((sample, i) => places.set(sample, i));
  const addresses = new Map();
  const answers = new Map();
  return {
    count: samples.length,
    images: kinds.includes("image"),
    wide: kinds.some((kind) => kind === "text" || kind === "row"), // more to read than a thumbnail has room for
    has: (sample) => places.has(sample),
    kind: (sample) => kinds[places.get(sample)],
    bytes(sample) {
      const i = places.get(sample);
      return content.subarray(i ? ends[i - 1] : 0, ends[i]);
    },
    // From a server; null where there is none. Asked for once.
    fetch(source, sample) {
      if (!answers.has(sample)) answers.set(sample, fetched(source.replace("{sample}", sample)).then((answer) => answer.json(), () => null));
      return answers.get(sample);
    },
    text(sample) {
      return new TextDecoder().decode(this.bytes(sample));
    },
    address(sample) {
      if (!addresses.has(sample)) {
        const content = this.bytes(sample);
        const type = content[0] === 0xff ? "image/jpeg" : "image/webp";
        addresses.set(sample, URL.createObjectURL(new Blob([content], { type })));
      }
      return addresses.get(sample);
    },
  };
}

const CLASS_COLUMNS = new Set(["label", "prediction", "suggested_label"]);
const HIDDEN = new Set(["map_x", "map_y"]);

// What a column is called, and what it means; columns of one's own keep their names.
const titleOf = (data, name) => data.words[name]?.title ?? name.replaceAll("_", " ");
const meaningOf = (data, name) => (data.words[name] ? `${data.words[name].meaning} (column ${name})` : name);

// What a value of a column is to a person.
function shown(data, name, sample) {
  const column = data.columns[name];
  const value = column.values[sample];
  if (column.kind === "text") return name === "status" ? data.statuses[column.texts[value]].title : column.texts[value];
  if (column.kind === "truth") return value ? "yes" : "no";
  if (isClass(data, name)) return data.classes[value] ?? String(value);
  return column.kind === "f" ? rounded(value) : String(value);
}

const isClass = (data, name) => CLASS_COLUMNS.has(name) && data.classes && data.columns[name].kind !== "f";

function rounded(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "–" : String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(2) : value.toFixed(size < 10 ? 3 : 1);
}

const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u00a0%`;

// By which column samples are listed, the most telling first.
const rankedBy = (data) => ["label_suspicion", "target_suspicion", "error", "novelty"].find((name) => data.columns[name]);

// The classes by which samples are compared: labels, or predictions where there are none; null without classes.
function groupColumn(data) {
  const name = ["label", "prediction"].find((key) => data.columns[key] && isClass(data, key));
  return name ?? null;
}

const looksWrong = (data, sample) => Boolean(data.columns.label_issue?.values[sample]);

function nameOf(data, sample) {
  return data.columns.name ? shown(data, "name", sample) : `Sample ${sample}`;
}

function similarity(data, sample, rank) {
  return data.similarities[sample * data.k + rank] / 5000 - 1;
}

// N_τ: how many samples are at least so similar; edges of bins are multiples of 0.05.
function countFrom(data, sample, threshold) {
  const bins = data.edges.length - 1;
  let total = 0;
  for (let bin = Math.round(((threshold + 1) * bins) / 2); bin < bins; bin++) total += data.counts[sample * bins + bin];
  return total;
}

// The histogram of a sample's similarities to the others. A run counts the sample too: at 1, or at 0 where its gradient is zero.
function otherCounts(data, sample) {
  const bins = data.edges.length - 1;
  const counts = Array.from(data.counts.subarray(sample * bins, (sample + 1) * bins));
  const own = counts[bins - 1] ? bins - 1 : Math.floor(bins / 2);
  counts[own] = Math.max(0, counts[own] - 1);
  return counts;
}

// Where a value stands among all samples: the share that is below, and the least and largest value; null for no number.
function standing(data, name, sample) {
  const { values } = data.columns[name];
  const value = values[sample];
  if (!Number.isFinite(value)) return null;
  let [below, above, known, low, high] = [0, 0, 0, Infinity, -Infinity];
  for (let i = 0; i < data.n; i++) {
    if (!Number.isFinite(values[i])) continue;
    known++;
    below += values[i] < value;
    above += values[i] > value;
    low = Math.min(low, values[i]);
    high = Math.max(high, values[i]);
  }
  return { below: below / known, above: above / known, low, high };
}

// The same in words: rounded down, so that nothing is said to exceed more than it does.
function standingText(data, name, { below, above, low, high }) {
  if (low === high) return "the same for all samples";
  const more = { novelty: "more unusual than", label_suspicion: "more suspicious than", target_suspicion: "more suspicious than" }[name] ?? "higher than";
  if (!above) return below > 0.5 ? "the highest" : below < 0.01 ? "as high as nearly all" : `as high as any, ${more} ${floored(below)}`;
  if (!below) return above > 0.5 ? "the lowest" : above < 0.01 ? "as low as nearly all" : `as low as any, lower than ${floored(above)}`;
  return `${more} ${floored(below)}`;
}

// A number as its column writes it: counts without digits after the point.
const written = (data, name, value) => (data.columns[name].kind === "i" ? value.toLocaleString("en", { useGrouping: Math.abs(value) < 1e7 }) : rounded(value));
const rangeText = (data, name, { low, high }) => `range ${written(data, name, low)} to ${written(data, name, high)}`;

const floored = (share) => `${share >= 0.99 ? Math.floor(1000 * share) / 10 : Math.floor(100 * share)}\u00a0% of the samples`;

// 95 % interval of a share, by Wilson's formula.
function wilson(hits, count) {
  if (!count) return [0, 1];
  const z = 1.959963984540054;
  const p = hits / count;
  const middle = p + (z * z) / (2 * count);
  const spread = z * Math.sqrt((p * (1 - p)) / count + (z * z) / (4 * count * count));
  return [(middle - spread) / (1 + (z * z) / count), (middle + spread) / (1 + (z * z) / count)];
}
