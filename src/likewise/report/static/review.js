// The review queue: suspicious labels one by one, judged by keyboard, kept in the browser, downloaded as JSON.

const VERDICTS = { __proto__: null, w: "wrong", r: "right", u: "unsure", l: "relabel" };

function makeReview(state) {
  const { data } = state;
  const place = document.getElementById("review");
  if (!place) return;
  const queue = queueOf(data);
  const store = makeStore(`likewise:${data.run}`);
  const review = { at: 0, queue, decisions: store.read(), place };
  const go = (by) => {
    review.at = Math.max(0, Math.min(queue.length - 1, review.at + by));
    draw();
  };
  const decide = (verdict, label) => {
    const sample = queue[review.at];
    const suggested = data.columns.suggested_label.values[sample];
    review.decisions[sample] = verdict === "relabel" ? { verdict, label: label ?? suggested } : { verdict };
    store.write(review.decisions);
    go(1);
  };
  const draw = () => place.replaceChildren(...reviewParts(state, review, decide, go));
  document.addEventListener("keydown", (event) => {
    const act = { ArrowRight: () => go(1), ArrowLeft: () => go(-1) }[event.key] ?? (VERDICTS[event.key] && (() => decide(VERDICTS[event.key])));
    if (!act || !queue.length || !isForReview(event, place)) return;
    event.preventDefault();
    if (isOnScreen(place)) act();
    else place.scrollIntoView({ block: "center" }); // a verdict is about what one sees
    place.focus({ preventScroll: true });
  });
  draw();
}

// Keys work wherever the focus is, but for what is typed into fields, an open sample, and arrows that move something else.
function isForReview(event, place) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || !document.getElementById("drawer").hidden) return false;
  if (event.target.closest?.("input, select, textarea, [contenteditable]")) return false;
  return !event.key.startsWith("Arrow") || event.target === document.body || place.contains(event.target);
}

function isOnScreen(place) {
  const { top, bottom } = place.getBoundingClientRect();
  return bottom > 0 && top < innerHeight;
}

function queueOf(data) {
  const { label_issue: flagged, label_suspicion: suspicion } = data.columns;
  const found = [];
  flagged.values.forEach((value, i) => value && found.push(i));
  return found.sort((a, b) => suspicion.values[b] - suspicion.values[a]);
}

// A browser may refuse storage to a file from disk: then decisions last as long as the page, and it says so.
function makeStore(key) {
  try {
    localStorage.setItem(`${key}:test`, "1");
    localStorage.removeItem(`${key}:test`);
    return {
      read: () => JSON.parse(localStorage.getItem(key) ?? "{}"),
      write: (decisions) => localStorage.setItem(key, JSON.stringify(decisions)),
    };
  } catch {
    document.getElementById("review").before(element("p", { class: "note" }, "This browser keeps nothing for files: download before you close the page."));
    return { read: () => ({}), write: () => {} };
  }
}

function reviewParts(state, review, decide, go) {
  const { data } = state;
  const { queue, at, decisions } = review;
  if (!queue.length) return [element("p", {}, "No label looks wrong.")];
  const sample = queue[at];
  const decided = queue.filter((i) => decisions[i]).length;
  const mine = decisions[sample];
  const button = (key, text) => element("button", { type: "button", class: mine?.verdict === VERDICTS[key] ? "chosen" : "", "data-verdict": VERDICTS[key], onclick: () => decide(VERDICTS[key]) }, text);
  const choice = element("select", { "aria-label": "relabel as", onchange: (event) => event.target.value && decide("relabel", Number(event.target.value)) }, element("option", { value: "" }, "relabel as …"), ...data.classes.map((name, i) => element("option", { value: i }, name)));
  return [
    element("div", { class: "review-line" }, element("span", { class: "progress", "data-decided": decided }, `${at + 1} of ${queue.length} · ${decided} decided`), element("progress", { max: queue.length, value: decided })),
    element(
      "div",
      { class: "review-card", "data-sample": sample },
      element("button", { type: "button", class: "plain", title: "open this sample", onclick: () => state.open(sample) }, picture(data, sample, true)),
      element(
        "div",
        {},
        element("p", { class: "verdict-line" }, "labeled ", element("strong", {}, shown(data, "label", sample)), ", looks like ", element("strong", { class: "alarm" }, shown(data, "suggested_label", sample))),
        element("p", {}, `Suspicion ${shown(data, "label_suspicion", sample)} · the network predicts ${data.columns.prediction ? shown(data, "prediction", sample) : "–"}${mine ? ` · you said: ${mine.verdict}${mine.label == null ? "" : ` ${data.classes[mine.label]}`}` : ""}`),
        element("div", { class: "gallery neighbors" }, ...neighborTiles(state, sample).slice(0, 8)),
        element("div", { class: "buttons" }, button("w", "wrong (w)"), button("r", "right (r)"), button("u", "unsure (u)"), button("l", "relabel (l)"), choice),
        element("div", { class: "buttons" }, element("button", { type: "button", onclick: () => go(-1) }, "← previous"), element("button", { type: "button", onclick: () => go(1) }, "next →"), element("button", { type: "button", id: "download", onclick: () => download(state, decisions) }, "Download decisions")),
      ),
    ),
  ];
}

function download(state, decisions) {
  const listed = Object.entries(decisions).map(([sample, decision]) => ({ sample: Number(sample), ...decision }));
  const text = JSON.stringify({ run: state.data.run, decisions: listed }, null, 1);
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = element("a", { href: address, download: "decisions.json" });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
