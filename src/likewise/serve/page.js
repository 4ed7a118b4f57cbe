// The live page: ask about a new input, review labels, see the report.
import { element, mountReview, neighborTile } from "./components.js";

const $ = (id) => document.getElementById(id);

async function request(address, options) {
  const response = await fetch(address, options);
  const found = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  if (!response.ok) throw new Error(found.error);
  return found;
}

// --- asking ----------------------------------------------------------------------------------------------------------

let asked = 0;

async function ask(body, type) {
  const mine = ++asked;
  const place = $("answer");
  place.dataset.state = "waiting";
  place.replaceChildren(element("p", { class: "lw-quiet empty" }, "Asking …"));
  try {
    const found = await request("ask?k=12", { method: "POST", body, headers: { "Content-Type": type } });
    if (mine !== asked) return; // another question has been asked since
    place.replaceChildren(...answerParts(found));
    place.dataset.state = "answered";
  } catch (error) {
    if (mine !== asked) return;
    place.replaceChildren(element("p", { class: "error" }, error.message));
    place.dataset.state = "failed";
  }
}

function answerParts(found) {
  const percent = (share) => (share > 0.99 && share < 1 ? "> 99 %" : `${Math.round(100 * share)} %`);
  const name = found.prediction_name || (found.prediction == null ? "" : [found.prediction].flat().map((v) => Number(v).toPrecision(4)).join(", "));
  const verdict = found.trusted
    ? element("div", { class: "verdict" }, element("p", { id: "verdict" }, `${found.verdict[0].toUpperCase()}${found.verdict.slice(1)}.`))
    : element("div", { class: "verdict distrust" }, element("p", {}, "Look twice:"), element("ul", {}, ...found.reasons.map((reason) => element("li", {}, reason))));
  const meters = [
    found.agreement != null && meter("Neighbor agreement", percent(found.agreement), found.agreement, "share of similar samples, weighted by similarity, with this label"),
    found.novelty != null && meter("Novelty", found.novelty.toFixed(2), (found.novelty_percentile ?? 0) / 100, unusual(found)),
    found.shift != null && meter("Prediction gap", found.shift.toFixed(2), Math.min(1, found.shift), "distance from the predictions of similar samples: 0 is the same, 1 another class"),
  ].filter(Boolean);
  return [
    name && element("p", { class: "prediction" }, element("strong", { id: "prediction" }, name), found.confidence == null ? null : element("span", { class: "lw-quiet" }, `the network's own confidence: ${percent(found.confidence)}`)),
    verdict,
    element("dl", { class: "meters" }, ...meters),
    element("p", { class: "lw-head" }, "It rests on these training samples"),
    element("div", { class: "lw-tiles", id: "neighbors" }, ...found.neighbors.map((near) => neighborTile(near, found.prediction_name ? near.label_name === found.prediction_name : null))),
    ...changeParts(found),
  ].filter(Boolean);
}

// Where a novelty stands, rounded down.
function unusual({ novelty_percentile: percentile, novelty_comparison: otherwise }) {
  if (percentile == null) return otherwise;
  if (percentile === 100) return "more unusual than all of the training data";
  return `more unusual than ${Math.floor(10 * percentile) / 10} % of the training data`;
}

// The fewest training samples without which the similar ones would vote otherwise.
function changeParts({ counterfactual: change }) {
  if (!change) return [];
  const all = change.samples ?? [];
  const samples = all.length === change.leave_out ? all : []; // the beginning of a long list is that of the neighbors above
  return [
    element("p", { class: "lw-head" }, "What would change it"),
    element("p", { id: "change" }, change.text),
    samples.length ? element("div", { class: "lw-tiles", id: "change-samples" }, ...samples.map((sample) => neighborTile(sample, null))) : null,
  ];
}

function meter(title, value, share, meaning) {
  const filled = element("i", {});
  filled.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  return element("div", {}, element("dt", {}, title), element("dd", {}, value, element("span", { class: "bar" }, filled), element("small", {}, meaning)));
}

const FORMS = {
  image() {
    const shown = element("div", {}, element("strong", {}, "Drop an image"), element("p", { class: "lw-quiet" }, "or click to choose, or paste one"));
    const file = element("input", { type: "file", accept: "image/*", id: "file", "aria-label": "Choose an image" });
    const area = element("label", { class: "drop", id: "drop" }, file, shown);
    const take = (given) => {
      if (!given) return;
      const preview = element("img", { alt: "your image", src: URL.createObjectURL(given) });
      preview.addEventListener("load", () => URL.revokeObjectURL(preview.src));
      shown.replaceChildren(preview, element("p", { class: "lw-quiet" }, "drop another"));
      ask(given, given.type || "application/octet-stream");
    };
    file.addEventListener("change", () => take(file.files[0]));
    for (const name of ["dragover", "dragleave", "drop"]) {
      area.addEventListener(name, (event) => {
        event.preventDefault();
        area.classList.toggle("over", name === "dragover");
        if (name === "drop") take(event.dataTransfer.files[0]);
      });
    }
    document.addEventListener("paste", (event) => take([...event.clipboardData.files].find((f) => f.type.startsWith("image/"))));
    return [area];
  },
  text() {
    const field = element("textarea", { id: "text", placeholder: "Paste a text", "aria-label": "A text" });
    return [field, element("button", { type: "button", class: "lw-button go", id: "go", onclick: () => ask(field.value, "text/plain") }, "Ask")];
  },
  row(about) {
    const names = about.columns;
    if (!names) {
      const field = element("textarea", { id: "text", placeholder: '{"column": 1.5, "other": "x"}', "aria-label": "A row as JSON" });
      return [field, element("button", { type: "button", class: "lw-button go", id: "go", onclick: () => ask(`{"row": ${field.value}}`, "application/json") }, "Ask")];
    }
    const fields = names.map((name) => element("input", { name, inputmode: "decimal", autocomplete: "off" }));
    const paste = element("textarea", { id: "text", placeholder: `Paste a row: ${names.slice(0, 4).join(", ")} …`, "aria-label": "Paste a row" });
    paste.style.minHeight = "4rem";
    paste.addEventListener("input", () => {
      const cells = paste.value.trim().split(/[\t,;]\s*|\s{2,}/);
      if (cells.length === names.length) cells.forEach((cell, i) => (fields[i].value = cell));
    });
    const send = () => ask(JSON.stringify({ row: Object.fromEntries(fields.map((field) => [field.name, field.value])) }), "application/json");
    const grid = element("div", { class: "fields" }, ...names.map((name, i) => element("label", {}, name, fields[i])));
    return [paste, grid, element("button", { type: "button", class: "lw-button go", id: "go", onclick: send }, "Ask")];
  },
};

// --- reviewing; the report keeps its decisions in this browser, and they are the same ones ---------------------------

const asMap = (found) => Object.fromEntries(found.decisions.map(({ sample, verdict, label }) => [sample, label == null ? { verdict } : { verdict, label }]));

async function makeReview(about) {
  const key = `likewise:${about.run}`;
  const known = asMap(await request("decisions"));
  const send = (entries) => request("decisions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ run: about.run, decisions: entries }) });
  const first = await request("suspects?start=0&count=10");
  const review = mountReview($("queue"), {
    classes: about.classes,
    total: first.total,
    flagged: first.flagged,
    decisions: known,
    everywhere: true,
    load: async (start, count) => (start === 0 ? first : await request(`suspects?start=${start}&count=${count}`)).samples,
    decide: async (sample, decision) => {
      await send([{ sample, verdict: null, ...decision }]);
      if (decision) known[sample] = decision;
      else delete known[sample];
      byReport.delete(String(sample));
      store(key, known);
      $("report").replaceChildren(); // it is loaded again, with this decision
      if (!$("report").hidden) showReport(); // it was opened before this decision was kept
    },
  });
  // The report writes all decisions that it knows. One that is missing was taken back there only if it was made there.
  const byReport = new Set();
  const take = async (found) => {
    const isNew = ([sample, { verdict, label }]) => verdict !== known[sample]?.verdict || label !== known[sample]?.label;
    const added = Object.entries(found).filter(isNew);
    const gone = [...byReport].filter((sample) => known[sample] && !found[sample]);
    added.forEach(([sample, decision]) => (known[sample] = decision) && byReport.add(sample));
    gone.forEach((sample) => delete known[sample] && byReport.delete(sample));
    const changed = [...added.map(([sample, decision]) => ({ sample: Number(sample), ...decision })), ...gone.map((sample) => ({ sample: Number(sample), verdict: null }))];
    if (!changed.length) return;
    await send(changed);
    review.update(known);
  };
  await take({ ...read(key), ...known }); // what was decided in the report before; the run folder is right where both know
  byReport.clear();
  store(key, known);
  let taking = Promise.resolve(); // one after the other, in the order in which the report wrote
  document.body.dataset.taken = 0;
  window.addEventListener("storage", (event) => {
    if (event.key !== key || !event.newValue) return;
    taking = taking.then(async () => {
      await take(parse(event.newValue)).catch((error) => review.say(`Not saved: ${error.message}`));
      if (localStorage.getItem(key) === event.newValue) store(key, known); // else the report has written again since
      document.body.dataset.taken = Number(document.body.dataset.taken) + 1;
    });
  });
}

// What the report's review keeps: sample -> decision. Anything else in its place is left alone.
const read = (key) => parse(localStorage.getItem(key));

function parse(text) {
  try {
    const found = JSON.parse(text ?? "{}");
    const entries = Object.entries(found).filter(([sample, decision]) => /^\d+$/.test(sample) && typeof decision?.verdict === "string");
    return Object.fromEntries(entries.map(([sample, { verdict, label }]) => [sample, label == null ? { verdict } : { verdict, label }]));
  } catch {
    return {};
  }
}

function store(key, decisions) {
  localStorage.setItem(key, JSON.stringify(decisions));
}

// --- the page --------------------------------------------------------------------------------------------------------

const PARTS = ["ask", "review", "report"];

function show(part) {
  for (const name of PARTS) {
    $(name).hidden = name !== part;
    const button = document.querySelector(`nav [data-part=${name}]`);
    name === part ? button.setAttribute("aria-current", "page") : button.removeAttribute("aria-current");
  }
  if (part === "report") showReport();
  history.replaceState(null, "", `#${part}`);
}

// The report, with the focus: its keys work at once.
function showReport() {
  const there = $("report").firstChild;
  const frame = there ?? element("iframe", { src: "report", title: "The report of the run", onload: () => frame.contentWindow.focus() });
  if (there) frame.contentWindow.focus();
  else $("report").append(frame);
}

async function start() {
  const about = await request("about");
  document.title = `${about.model} · likewise`;
  $("about").textContent = `${about.model} · ${about.samples.toLocaleString("en")} samples${about.classes ? ` · ${about.classes.length} classes` : ""}`;
  document.querySelectorAll("nav [data-part]").forEach((button) => {
    if (button.dataset.part !== "ask") button.hidden = !about.report;
    button.addEventListener("click", () => show(button.dataset.part));
  });
  if (about.input) $("input").append(...FORMS[about.input](about));
  else $("input").append(element("p", { class: "lw-quiet" }, "This run has no index, so it cannot answer questions about new inputs. Build one with likewise index, and serve both with likewise serve RUN --index INDEX."));
  $("command").textContent = about.command ?? "";
  if (about.report) await makeReview(about);
  const wanted = location.hash.slice(1);
  show(PARTS.includes(wanted) && (wanted === "ask" || about.report) ? wanted : about.input || !about.report ? "ask" : "review");
  document.body.dataset.ready = "yes";
}

start().catch((error) => {
  $("about").textContent = error.message;
  $("about").classList.add("error");
});
