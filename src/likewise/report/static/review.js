// The review: suspicious labels one by one. Decisions are made by keyboard, stored in the browser, downloaded as JSON.

const SPOT_CHECKS = 30;
const NEIGHBORS_SHOWN = 10;
const MORE = 25; // labels without a flag to review next, once all flagged ones are decided

function makeReview(state) {
  const { data } = state;
  const place = document.getElementById("review");
  if (!place) return;
  const store = makeStore(`likewise:${data.run}`, place);
  const queues = { worst: queueOf(data), spot: data.spotCheck?.samples.slice(0, SPOT_CHECKS) ?? [] };
  const review = {
    state, place, store, queues, mode: "worst", at: 0, decisions: store.read(), past: [],
    get queue() { return review.mode === "worst" ? review.shown : review.queues.spot; }, // a random draw is not filtered
    shown: queues.worst,
    go(by) { review.show(review.at + by); },
    show(at) {
      review.at = Math.max(0, Math.min(review.queue.length - 1, at));
      drawReview(review);
    },
    switchTo(mode) {
      review.mode = mode;
      review.show(firstUndecided(review));
    },
    decide(verdict, label, sample = review.queue[review.at]) {
      const { label: labels, suggested_label: suggested } = data.columns;
      if (sample == null) return;
      if (verdict === "relabel" && label == null && suggested.values[sample] === labels.values[sample]) return review.say("It looks like its label; press c to choose another class.");
      review.past.push({ sample, before: review.decisions[sample], mode: review.mode });
      review.decisions[sample] = verdict === "relabel" ? { verdict, label: label ?? data.columns.suggested_label.values[sample] } : { verdict };
      review.say(`${nameOf(data, sample)}: ${saidOf(data, review.decisions[sample])}.`);
      review.keep();
      if (sample !== review.queue[review.at]) return drawReview(review); // decided elsewhere: the queue stays where it is
      const next = review.queue.findIndex((other, i) => i > review.at && !review.decisions[other]);
      review.show(next < 0 ? review.at + 1 : next);
    },
    // Add the next labels by suspicion, once the whole queue is decided.
    goOn() {
      review.shown = [...review.shown, ...nextOf(review)];
      if (!state.selected) review.queues.worst = review.shown;
      showProgress(review);
      review.show(firstUndecided(review));
    },
    // Drop a copy; a second press keeps it.
    toggleDrop(sample) {
      if (review.decisions[sample]?.verdict !== "drop") return review.decide("drop", undefined, sample);
      review.past.push({ sample, before: review.decisions[sample], mode: review.mode });
      delete review.decisions[sample];
      review.say(`${nameOf(data, sample)}: kept.`);
      review.keep();
      drawReview(review);
    },
    undo() {
      const last = review.past.pop();
      if (!last) return review.say("Nothing to undo.");
      if (last.before) review.decisions[last.sample] = last.before;
      else delete review.decisions[last.sample];
      review.mode = last.mode;
      review.say(`Undone: ${nameOf(data, last.sample)}.`);
      review.keep();
      const at = review.queue.indexOf(last.sample);
      review.show(at < 0 ? review.at : at);
    },
    keep() {
      store.write(review.decisions);
      showProgress(review);
      state.decided();
    },
    say(text) { document.getElementById("said").textContent = text; },
  };
  document.addEventListener("keydown", (event) => onKey(review, event));
  document.body.append(Object.assign(makeKeysWindow(element), { id: "keys" }));
  document.querySelectorAll("[data-review]").forEach((link) => link.addEventListener("click", () => review.switchTo(link.dataset.review)));
  makePicker(review);
  makeProgress(review);
  state.review = review;
  review.at = firstUndecided(review);
  state.on("selection", () => {
    const before = review.queue[review.at];
    review.shown = queueOf(data, state.selected);
    if (review.mode === "worst") review.at = review.queue.includes(before) ? review.queue.indexOf(before) : firstUndecided(review);
    drawReview(review);
  });
  drawReview(review);
}

// The card that leads to the review shows its progress and, at the end, offers the download.
function makeProgress(review) {
  const link = document.querySelector(".step [data-review=worst]");
  if (!link) return;
  const [value, title] = [".value", ".title"].map((part) => link.closest(".step").querySelector(part));
  const told = element("p", { class: "downloaded", role: "status" });
  link.after(told);
  review.card = { link, value, title, before: [value.textContent, title.textContent, link.textContent] };
  link.addEventListener("click", (event) => {
    if (!isFinished(review)) return;
    event.preventDefault();
    download(review.state, review.decisions, told);
  });
  showProgress(review);
}

const isFinished = ({ queues, decisions }) => queues.worst.every((sample) => decisions[sample]);

function showProgress(review) {
  if (!review.card) return;
  const { link, value, title, before } = review.card;
  const all = review.queues.worst;
  const decided = all.filter((sample) => review.decisions[sample]).length;
  const told = [`${decided.toLocaleString("en")} of ${all.length.toLocaleString("en")}`, `${all.length === 1 ? "label" : "labels"} decided`];
  const words = !decided ? before : isFinished(review) ? [told[0], `${told[1]}: download`, "Download decisions"] : [...told, "Continue"];
  [value.textContent, title.textContent, link.textContent] = words;
}

function firstUndecided({ queue, decisions }) {
  return Math.max(0, queue.findIndex((sample) => !decisions[sample]));
}

function onKey(review, event) {
  const act = {
    __proto__: null,
    ArrowRight: () => review.go(1),
    ArrowLeft: () => review.go(-1),
    z: () => review.undo(),
    c: () => document.getElementById("picker").openFor(),
    l: () => (review.mode === "spot" ? document.getElementById("picker").openFor() : takeSuggestion(review)), // no suggestion there
    "?": () => document.getElementById("keys").showModal(),
  }[event.key] ?? (VERDICT_OF_KEY[event.key] && (() => review.decide(VERDICT_OF_KEY[event.key])));
  const undo = event.key === "z" && (event.ctrlKey || event.metaKey) && !event.shiftKey;
  if (!act || !review.queue.length || !isForReview(event, review.place, undo)) return;
  event.preventDefault();
  if (isOnScreen(review.place) || event.key === "?") act();
  else review.place.scrollIntoView({ block: "start" }); // a verdict is about what one sees
}

// For key and button: a doubtful suggestion is not accepted directly; the list of classes opens with it on top.
function takeSuggestion(review) {
  const { data } = review.state;
  const sample = review.queue[review.at];
  if (!isDoubtful(data, sample)) return review.decide("relabel");
  document.getElementById("picker").openFor(undefined, data.columns.suggested_label.values[sample]);
}

// Keys work wherever the focus is, except while typing into fields, with a sample open, and for arrows that move something else.
function isForReview(event, place, undo) {
  if (((event.ctrlKey || event.metaKey) && !undo) || event.altKey || event.isComposing) return false;
  if (!document.getElementById("drawer").hidden || document.querySelector("dialog[open]")) return false;
  if (event.target.closest?.("input, select, textarea, [contenteditable]")) return false;
  return !event.key.startsWith("Arrow") || event.target === document.body || place.contains(event.target);
}

function isOnScreen(place) {
  const { top, bottom } = place.getBoundingClientRect();
  return bottom > 80 && top < innerHeight - 80;
}

// The labels that look wrong among some samples (null: all), worst first; if there are none, the top of the ranking.
function queueOf(data, among = null) {
  const { label_issue: flagged, label_suspicion: suspicion } = data.columns;
  const all = among ?? Array.from({ length: data.n }, (_, i) => i);
  const most = (a, b) => suspicion.values[b] - suspicion.values[a];
  const found = all.filter((i) => flagged.values[i]);
  return found.length ? found.sort(most) : [...all].sort(most).slice(0, 50);
}

// The most suspicious of all, or of those selected, that are neither in the queue nor decided.
function nextOf({ state: { data, selected }, shown, decisions }) {
  const { values } = data.columns.label_suspicion;
  const [all, queued] = [selected ?? Array.from({ length: data.n }, (_, i) => i), new Set(shown)];
  return all.filter((i) => !queued.has(i) && !decisions[i]).sort((a, b) => values[b] - values[a]).slice(0, MORE);
}

// A browser may refuse storage to a file from disk: decisions then last as long as the page, and a note says so.
function makeStore(key, place) {
  try {
    localStorage.setItem(`${key}:test`, "1");
    localStorage.removeItem(`${key}:test`);
    return {
      read: () => JSON.parse(localStorage.getItem(key) ?? "{}"),
      write: (decisions) => localStorage.setItem(key, JSON.stringify(decisions)),
    };
  } catch {
    place.before(element("p", { class: "note" }, "This browser stores nothing for local files: download your decisions before you close the page."));
    return { read: () => ({}), write: () => {} };
  }
}

const saidOf = (data, { verdict, label }) => (verdict === "relabel" ? `relabel as ${data.classes[label]}` : verdict);

function drawReview(review) {
  const { state, queue, at, place } = review;
  const sample = queue[at];
  const nothing = () => [element("p", { id: "review-filter" }, state.selected ? "No sample is selected, so there is nothing to review. " : "There is no label to review.", state.selected ? button("Show all again", state.showAll, { class: "link" }) : null)];
  place.replaceChildren(...(sample == null ? nothing() : reviewParts(review, sample)));
  state.setFocus(sample == null || isBlind(review, sample) ? null : sample); // the ring's place on the map is an opinion, too
}

function reviewParts(review, sample) {
  const { state, queue, at, decisions, mode } = review;
  const { data } = state;
  const decided = queue.filter((i) => decisions[i]).length;
  const tab = (name, text) => button(text, () => review.switchTo(name), { "aria-pressed": mode === name, "data-mode": name });
  return [
    element(
      "div",
      { class: "review-line" },
      data.spotCheck ? element("div", { class: "tabs", role: "group", "aria-label": "Which labels to review" }, tab("worst", "Worst first"), tab("spot", "Spot check")) : null,
      element("span", { class: "progress", "data-decided": decided, "data-at": at }, `${at + 1} of ${queue.length} · ${decided} decided`),
      element("progress", { max: queue.length, value: decided, "aria-label": "Decided" }),
    ),
    filterNote(review),
    mode === "spot" ? estimateBox(review) : null,
    decided === queue.length ? element("p", { class: "estimate", id: "done" }, element("strong", {}, `All ${counted(queue.length, "label")} decided. `), "Download the decisions, then ", element("code", {}, data.command), " writes the corrected data.", ...moreOf(review)) : null,
    element("div", { class: "review-card", "data-sample": sample }, enlargeable(data, sample), element("div", { class: "evidence" }, ...evidence(state, sample, decisions[sample], isBlind(review, sample)))),
    actions(review, sample),
    element("p", { class: "keys quiet" }, "The keys on the buttons work on the whole page, except while you type in a field or a sample is open; ", button("?", () => document.getElementById("keys").showModal(), { id: "show-keys", "aria-label": "Show all keys" }), " shows all. ", element("kbd", {}, "←"), " ", element("kbd", {}, "→"), " move if nothing else has the focus."),
    filmstrip(review),
  ].filter(Boolean);
}

function moreOf(review) {
  const next = review.mode === "worst" ? nextOf(review) : [];
  return next.length ? [" If the last ones were wrong, the next ones may be too. ", button(`Continue with ${counted(next.length, "more label")}`, review.goOn, { id: "go-on" })] : [];
}

// What a selection or a filter leaves to review.
function filterNote({ state, mode, queue }) {
  if (!state.selected) return null;
  const flagged = queue.length && state.data.columns.label_issue.values[queue[0]];
  const text = mode === "spot" ? "Spot checks are drawn from all samples, whatever is selected."
    : flagged ? `${counted(queue.length, "label that looks", "labels that look")} wrong among the ${counted(state.selected.length, "selected sample")}.`
    : `No label among the ${counted(state.selected.length, "selected sample")} looks wrong; the most suspicious come first.`;
  return element("p", { class: "filter-note", id: "review-filter" }, text, " ", button("Show all again", state.showAll, { class: "link" }));
}

function estimateBox({ state, decisions }) {
  const { seen, lines } = describeEstimate(state.data, decisions);
  return element("div", { class: "estimate", id: "estimate", "data-seen": seen }, element("p", {}, "Drawn at random from the whole ranking, so many of these labels are right. ", term(state.data, "spot_check", "Why?")), ...lines.map((line) => element("p", { class: "line" }, line)));
}

// A spot check hides the network's opinion, which would bias the estimate.
const isBlind = ({ mode, decisions }, sample) => mode === "spot" && !decisions[sample];

// Never rounded to 0 or 1, which would claim certainty.
const probability = (share) => (share > 0.99 ? "> 99\u00a0%" : share < 0.01 ? "< 1\u00a0%" : percent(share));

// The evidence in words and pictures: similar samples and their labels.
function evidence(state, sample, mine, blind) {
  const { data } = state;
  const { label, suggested_label: suggested, label_issue: flagged, chance_wrong: chance } = data.columns;
  const told = shown(data, "suggested_label", sample);
  const differs = suggested.values[sample] !== label.values[sample];
  const certain = chance && flagged.values[sample] && Number.isFinite(chance.values[sample]);
  const facts = [
    ...votesText(data, sample),
    data.columns.prediction ? `The network says ${shown(data, "prediction", sample)}. ` : "",
    ...(certain ? [term(data, "chance_wrong", "Probability wrong"), `: ${probability(chance.values[sample])}.`] : []),
  ];
  return [
    element("h3", { class: "verdict-line" }, "Labeled ", element("strong", {}, shown(data, "label", sample)), ...(blind ? [] : differs ? [isDoubtful(data, sample) ? ", perhaps " : ", looks like ", element("strong", { class: "signal" }, told)] : [", and looks like it"])),
    element("p", { class: "why" }, ...(blind ? ["Decide only by what you see. The network's opinion and the neighbors appear once you have decided."] : facts)),
    blind ? null : element("div", { class: "gallery neighbors" }, ...neighborTiles(state, sample, NEIGHBORS_SHOWN)),
    blind ? null : neighborLegend(data, NEIGHBORS_SHOWN),
    mine ? element("p", { class: "mine" }, `You said: ${saidOf(data, mine)}`) : null,
  ].filter(Boolean);
}

// How many of the nearest neighbors have the suggested label, and how many its own.
function countVotes(data, sample) {
  const { label } = data.columns;
  const others = neighborsOf(data, sample);
  const labeled = (name) => others.filter((i) => label.values[i] === data.columns[name].values[sample]).length;
  return { votes: labeled("suggested_label"), same: labeled("label"), all: others.length };
}

// Whether another label is suggested with little support: see likewise.report.suggestions.
const isDoubtful = (data, sample) => data.doubtful[sample] === 1;

// How the nearest neighbors are labeled, for and against the suggested label.
function votesText(data, sample) {
  const { label, suggested_label: suggested } = data.columns;
  const { votes, same, all } = countVotes(data, sample);
  const against = suggested.values[sample] === label.values[sample] ? "" : `, ${same || "none"} ${shown(data, "label", sample)}`;
  const { name, says } = data.judge;
  const own = name === "network" || name === "votes"; // then the neighbors' labels speak for themselves, unless they speak against it
  const yet = votes <= same ? ` Yet ${says}` : ` ${says[0].toUpperCase()}${says.slice(1)}`;
  const weighed = against && (votes <= same || !own) ? `${yet} ${shown(data, "suggested_label", sample)}.` : "";
  return [`${votes} of the ${all} most `, term(data, "similarity", "similar"), ` samples are labeled ${shown(data, "suggested_label", sample)}${against}.${weighed} `];
}

function actions(review, sample) {
  const { state, decisions } = review;
  const { data } = state;
  const mine = decisions[sample];
  const key = (letter) => element("kbd", { "aria-hidden": "true" }, letter);
  const first = isDoubtful(data, sample) ? "" : "l";
  const act = (letter, ...text) => {
    const { verdict, does } = REVIEW_KEYS.find((one) => one.key === letter);
    const made = button("", () => (verdict === "relabel" ? takeSuggestion(review) : review.decide(verdict)), { class: letter === first ? "primary" : "", "aria-pressed": mine?.verdict === verdict, "data-verdict": verdict, title: does });
    made.append(element("span", {}, ...text), key(letter));
    return made;
  };
  const differs = data.columns.suggested_label.values[sample] !== data.columns.label.values[sample];
  const relabel = review.mode === "spot" ? null : act("l", "Relabel ", differs ? shown(data, "suggested_label", sample) : "", isDoubtful(data, sample) ? " …" : "");
  if (relabel) relabel.disabled = !differs; // buttons keep their places
  const other = button("", () => document.getElementById("picker").openFor(), { "data-verdict": "other" });
  other.append(element("span", {}, "Other class …"), key("c"));
  const undo = button("", review.undo, { id: "undo", "aria-label": "Undo" });
  undo.append(element("span", {}, "Undo"), key("z"));
  return element(
    "div",
    { class: "actions" },
    element("div", { class: "verdicts", role: "group", "aria-label": "Your decision" }, relabel, act("w", "Wrong"), act("r", "Right"), act("u", "Unsure"), act("d", "Drop"), other),
    element("div", { class: "moves" }, button("←", () => review.go(-1), { "aria-label": "Previous" }), button("→", () => review.go(1), { "aria-label": "Next" }), undo, button("Download decisions", () => download(state, decisions, document.getElementById("downloaded")), { id: "download" })),
  );
}

// The same decisions for the open sample, even if it is not in the queue.
function decisionRow(review, sample) {
  const { state: { data }, decisions } = review;
  const mine = decisions[sample];
  const { label, suggested_label: suggested } = data.columns;
  const isSuggested = suggested.values[sample] !== label.values[sample] && !isDoubtful(data, sample);
  const act = (text, verdict) => button(text, () => review.decide(verdict, undefined, sample), { "aria-pressed": mine?.verdict === verdict && !(verdict === "relabel" && mine.label !== suggested.values[sample]), "data-decide": verdict });
  return element(
    "div",
    { class: "decision" },
    element("div", { class: "verdicts", role: "group", "aria-label": "Your decision on this label" }, isSuggested ? act(`Relabel ${shown(data, "suggested_label", sample)}`, "relabel") : null, act("Wrong", "wrong"), act("Right", "right"), act("Unsure", "unsure"), act("Drop", "drop"), button("Other class …", () => document.getElementById("picker").openFor(sample), { "data-decide": "other" })),
    isSuggested ? element("p", { class: "quiet relabel-why" }, `Why ${shown(data, "suggested_label", sample)}? `, ...votesText(data, sample)) : null,
    mine ? element("p", { class: "mine" }, `You said: ${saidOf(data, mine)}`) : null,
  );
}

function filmstrip(review) {
  const { state, queue, at, decisions } = review;
  const { data } = state;
  const from = Math.max(0, Math.min(at - 2, queue.length - 10));
  return element(
    "div",
    { class: "filmstrip", role: "group", "aria-label": "The queue" },
    ...queue.slice(from, from + 10).map((sample, i) => {
      const mine = decisions[sample];
      const look = isBlind(review, sample) ? "" : shown(data, "suggested_label", sample);
      const made = element(
        "button",
        { type: "button", class: `frame${mine ? " done" : ""}`, "aria-current": from + i === at ? "true" : null, "aria-label": `${from + i + 1}: labeled ${shown(data, "label", sample)}${look && `, looks like ${look}`}${mine ? `, ${mine.verdict}` : ""}`, onclick: () => review.show(from + i) },
        picture(data, sample),
        element("span", {}, `${shown(data, "label", sample)}${look && ` → ${look}`}`),
        mine ? element("span", { class: "tick" }, { wrong: "✗", right: "✓", unsure: "?", relabel: "✎", drop: "✗" }[mine.verdict]) : null,
      );
      return made;
    }),
  );
}

// Choose any class by typing part of its name.
function makePicker(review) {
  const box = document.getElementById("picker");
  const field = box.querySelector("input");
  const list = box.querySelector("[role=listbox]");
  const { classes } = review.state.data;
  let found = [];
  let at = 0;
  let target; // undefined: the sample under review
  let front; // the class to list first until something is typed
  const draw = () => {
    const part = field.value.trim().toLowerCase();
    const fits = classes.map((name, i) => ({ name, i })).filter(({ name }) => name.toLowerCase().includes(part));
    const isFront = ({ i }) => !part && i === front;
    found = fits.sort((a, b) => isFront(b) - isFront(a) || b.name.toLowerCase().startsWith(part) - a.name.toLowerCase().startsWith(part) || a.i - b.i).slice(0, 50);
    at = Math.min(at, Math.max(0, found.length - 1));
    list.replaceChildren(...found.map(({ name, i }, place) => element("li", { role: "option", id: `class-${i}`, "aria-selected": String(place === at), onclick: () => choose(place) }, name)));
    found.length ? field.setAttribute("aria-activedescendant", `class-${found[at].i}`) : field.removeAttribute("aria-activedescendant");
    list.children[at]?.scrollIntoView({ block: "nearest" });
  };
  const choose = (place) => {
    if (!found[place]) return;
    box.close();
    review.decide("relabel", found[place].i, target);
  };
  field.addEventListener("input", () => {
    at = 0;
    draw();
  });
  field.addEventListener("keydown", (event) => {
    const moves = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (moves) at = (at + moves + found.length) % (found.length || 1);
    else if (event.key === "Enter") choose(at);
    else return;
    event.preventDefault();
    if (moves) draw();
  });
  box.openFor = (sample, suggested) => {
    target = sample;
    front = suggested;
    field.value = "";
    at = 0;
    draw();
    box.showModal();
    field.focus();
  };
}

// Download the decisions; a line that screen readers announce says what comes next.
function download(state, decisions, told) {
  const listed = Object.entries(decisions).map(([sample, decision]) => ({ sample: Number(sample), ...decision }));
  save("decisions.json", "application/json", JSON.stringify({ run: state.data.run, decisions: listed }, null, 1));
  const words = listed.length ? [`decisions.json downloaded (${counted(listed.length, "decision")}); next: `, element("code", {}, state.data.command)] : ["decisions.json downloaded, but nothing is decided yet."];
  told.replaceChildren(...words);
}

function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
