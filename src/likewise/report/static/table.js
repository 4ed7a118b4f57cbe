// The table: every sample, sorted and filtered; only the rows in view are elements, so that 100,000 are as quick as 100.

const ROW = 44; // pixels
const SPARE = 8; // rows above and below what is seen

function makeTable(state) {
  const { data } = state;
  const place = document.getElementById("table");
  const columns = tableColumns(data);
  const table = { state, place, columns, sort: rankedBy(data), down: true, rows: [], first: -1 };
  const body = element("tbody");
  const grid = element("table", { class: "grid", "aria-label": "All samples" }, element("colgroup", {}, ...columns.map(({ width }) => element("col", { style: `width: ${width}px` }))), element("thead", {}, headRow(table), filterRow(table)), body);
  grid.style.width = `${columns.reduce((sum, { width }) => sum + width, 0)}px`;
  Object.assign(table, { body, grid });
  place.replaceChildren(grid);
  place.addEventListener("scroll", () => drawRows(table), { passive: true });
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-sample]");
    if (row) state.open(Number(row.dataset.sample));
  });
  state.on("selection", () => refill(table));
  state.on("threshold", () => {
    if (data.columns.hard_neighbors) {
      for (let i = 0; i < data.n; i++) data.columns.hard_neighbors.values[i] = countFrom(data, i, state.threshold);
    }
    state.filters.has("hard_neighbors") ? state.filter([]) : refill(table, false);
  });
  refill(table);
  place.dataset.ready = "yes";
}

function tableColumns(data) {
  const first = ["name", "label", "suggested_label", "label_suspicion", "label_issue", "prediction", "log_likelihood", "error", ...data.ownColumns].filter((name) => data.columns[name]);
  const rest = [...first, ...Object.keys(data.columns).filter((name) => !HIDDEN.has(name) && !first.includes(name))];
  const least = (name) => (name === "name" ? 200 : data.columns[name].kind === "text" || isClass(data, name) ? 130 : 92);
  const width = (name) => Math.min(260, Math.max(least(name), 40 + 8 * titleOf(data, name).length)); // a head is not cut
  return [
    { name: null, title: "", width: data.pictures.wide ? Math.min(260, Math.round(innerWidth * 0.4)) : 62 },
    { name: "sample", title: titleOf(data, "sample"), width: 92 },
    ...rest.map((name) => ({ name, title: titleOf(data, name), width: width(name) })),
  ];
}

function headRow(table) {
  const { data } = table.state;
  return element(
    "tr",
    {},
    ...table.columns.map(({ name, title }) => {
      if (!name) return element("td", { class: "corner" });
      const head = element("th", { scope: "col", "data-field": name, class: isNumeric(data, name) ? "number" : "" });
      head.append(
        button(title, () => {
          table.down = table.sort === name ? !table.down : true;
          table.sort = name;
          refill(table);
        }, { title: meaningOf(data, name) }),
      );
      return head;
    }),
  );
}

function filterRow(table) {
  const { state, columns } = table;
  const { data } = state;
  let timer;
  const typed = new Map(); // since the filters were last taken over: several fields may change in one go
  const change = (name, value) => {
    typed.set(name, value);
    clearTimeout(timer);
    timer = setTimeout(() => {
      const changes = [...typed];
      typed.clear();
      state.filter(changes);
    }, 120);
  };
  const fields = new Map();
  const row = element(
    "tr",
    { class: "filters" },
    ...columns.map(({ name, title }) => {
      if (!name) return element("td");
      const label = `filter ${title}`;
      const choices = choicesOf(data, name);
      const field = choices
        ? element("select", { "aria-label": label, onchange: (event) => change(name, event.target.value) }, element("option", { value: "" }, "all"), ...choices.map((choice) => element("option", { value: `=${choice}` }, choice)))
        : element("input", { type: "search", "aria-label": label, placeholder: name === "sample" ? "=" : isNumeric(data, name) ? "≥" : "has …", oninput: (event) => change(name, event.target.value.trim()) });
      fields.set(name, field);
      return element("td", { "data-field": name }, field);
    }),
  );
  state.on("selection", () => {
    for (const [name, field] of fields) {
      const wanted = state.filters.get(name) ?? "";
      if (!typed.has(name) && field.value.trim() !== wanted) field.value = wanted; // cleared, or from the address
      field.classList.toggle("active", state.filters.has(name));
    }
  });
  return row;
}

function refill(table, toTop = true) {
  const { data, selected } = table.state;
  const rows = selected ? [...selected] : Array.from({ length: data.n }, (_, i) => i);
  const values = table.sort === "sample" ? null : data.columns[table.sort].values;
  const sign = table.down ? -1 : 1;
  const key = values ? (i) => (Number.isNaN(values[i]) ? sign * Infinity : values[i]) : (i) => i;
  table.rows = rows.sort((a, b) => sign * (key(a) - key(b)) || a - b);
  table.first = -1;
  table.grid.setAttribute("aria-rowcount", rows.length + 2);
  table.grid.querySelectorAll("thead th").forEach((head) => head.setAttribute("aria-sort", head.dataset.field !== table.sort ? "none" : table.down ? "descending" : "ascending"));
  table.place.dataset.rows = rows.length;
  if (toTop) table.place.scrollTop = 0;
  drawRows(table);
}

function drawRows(table) {
  const { place, rows, body, columns, state } = table;
  const first = Math.max(0, Math.floor(place.scrollTop / ROW) - SPARE);
  const last = Math.min(rows.length, first + Math.ceil((place.clientHeight || 520) / ROW) + 2 * SPARE);
  if (first === table.first && last === table.last) return;
  Object.assign(table, { first, last });
  const space = (count) => element("tr", { class: "space", "aria-hidden": "true" }, element("td", { colspan: columns.length, style: `height: ${count * ROW}px` }));
  const made = rows.slice(first, last).map((sample, at) => tableRow(table, sample, first + at));
  if (!rows.length) made.push(element("tr", {}, element("td", { colspan: columns.length, class: "nothing" }, "No sample matches: change a filter, or show all again.")));
  body.replaceChildren(...(first ? [space(first)] : []), ...made, ...(last < rows.length ? [space(rows.length - last)] : []));
}

function tableRow({ state, columns }, sample, at) {
  const { data } = state;
  return element(
    "tr",
    { "data-sample": sample, "aria-rowindex": at + 3 },
    ...columns.map(({ name }) => {
      if (!name) return element("td", { class: "seen" }, picture(data, sample));
      if (name === "sample") return element("td", { class: "number", "data-field": name }, button(String(sample), () => state.open(sample), { class: "link", "aria-label": `open sample ${sample}` }));
      const text = shown(data, name, sample);
      return element("td", { "data-field": name, class: isNumeric(data, name) ? "number" : "", title: text.length > 16 ? text : null }, text);
    }),
  );
}
