// The data of the page: a gzipped blob of a JSON header and typed arrays, see payload.py.

const TYPES = { f4: Float32Array, i4: Int32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array };

async function readData() {
  const text = atob(document.getElementById("data").textContent.trim());
  const zipped = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) zipped[i] = text.charCodeAt(i);
  const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
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
    columns,
    neighbors: array(header.neighbors),
    similarities: array(header.similarities),
    counts: array(header.counts),
    pictures: readPictures(array(samples), kinds, array(ends), new Uint8Array(buffer, start + content.at, content.bytes)),
  };
}

function readPictures(samples, kinds, ends, content) {
  const places = new Map();
  samples.forEach((sample, i) => places.set(sample, i));
  const addresses = new Map();
  return {
    count: samples.length,
    wide: kinds.some((kind) => kind === "text" || kind === "row"), // more to read than a thumbnail has room for
    has: (sample) => places.has(sample),
    kind: (sample) => kinds[places.get(sample)],
    bytes(sample) {
      const i = places.get(sample);
      return content.subarray(i ? ends[i - 1] : 0, ends[i]);
    },
    text(sample) {
      return new TextDecoder().decode(this.bytes(sample));
    },
    address(sample) {
      if (!addresses.has(sample)) {
        addresses.set(sample, URL.createObjectURL(new Blob([this.bytes(sample)], { type: "image/webp" })));
      }
      return addresses.get(sample);
    },
  };
}

// What a value of a column is to a person.
function shown(data, name, sample) {
  const column = data.columns[name];
  const value = column.values[sample];
  if (column.kind === "text") return column.texts[value];
  if (column.kind === "truth") return value ? "yes" : "no";
  if (CLASS_COLUMNS.has(name) && data.classes && column.kind !== "f") return data.classes[value] ?? String(value);
  return column.kind === "f" ? rounded(value) : String(value);
}

const CLASS_COLUMNS = new Set(["label", "prediction", "suggested_label"]);

function rounded(value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e5) ? value.toExponential(2) : value.toFixed(size < 10 ? 3 : 1);
}

// By which column samples are listed, the most telling first.
const rankedBy = (data) => ["label_suspicion", "error", "novelty"].find((name) => data.columns[name]);

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
