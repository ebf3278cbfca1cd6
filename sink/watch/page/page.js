// Shows /state.json, which is read again every few seconds, and for an opened table /table.json.
// Names and errors come from outside, so text only ever gets into the page by `textContent`.
"use strict";

const SECONDS = 5;
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const opened = new Map(); // number of a table -> what was last read of it
let state = null;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const isNumber = (value) => value !== null && value !== undefined;
const number = (value) => (isNumber(value) ? value.toLocaleString("en", { maximumFractionDigits: 1 }) : "–");

function short(value) {
  if (!isNumber(value)) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (value >= size) return `${(value / (unit === "k" ? 1e3 : size)).toFixed(1)} ${unit}`;
  }
  return number(value);
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value.toFixed(at ? 1 : 0)} ${units[at]}`;
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

function chart(title, points, shown, step) {
  const box = element("figure", null, "tile");
  const known = points.filter(isNumber);
  const most = Math.max(...known, 0);
  const last = known.length ? known[known.length - 1] : null;
  box.append(element("figcaption", `${title}: now ${shown(last)}, most ${shown(known.length ? most : null)}`, "faint"));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 360 60");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title} in the last ${Math.round((points.length * step) / 60)} minutes`);
  const floor = document.createElementNS(SVG, "line");
  for (const [name, at] of [["x1", 0], ["x2", 360], ["y1", 59], ["y2", 59]]) floor.setAttribute(name, at);
  const path = document.createElementNS(SVG, "path");
  let d = "";
  let isDrawing = false;
  points.forEach((value, at) => {
    if (!isNumber(value)) return; // a value that is known only at times is joined by a line
    const y = 58 - (most ? (value / most) * 54 : 0);
    d += `${isDrawing ? "L" : "M"}${((at / (points.length - 1)) * 360).toFixed(1)} ${y.toFixed(1)}`;
    isDrawing = true;
  });
  path.setAttribute("d", d);
  svg.append(floor, path);
  box.append(svg);
  return box;
}

function charts(history, step) {
  if (!history.rows) return [];
  // the last step isn't over, so its sum is not a rate yet
  const perSecond = (points) => points.slice(0, -1).map((value) => value / step);
  return [
    chart("Rows a second", perSecond(history.rows), short, step),
    chart("Behind", history.behind, short, step),
    chart("Micro-batch", history.batch_seconds, seconds, step),
    chart("Dead letters a second", perSecond(history.dead_letters), number, step),
  ];
}

const STATUS = { working: "good", failed: "bad", waiting: "wait", opening: "wait" };
const COLUMNS = [
  ["Table", (t) => t],
  ["Status", (t) => t.status],
  ["Behind", (t) => (isNumber(t.behind) ? `${short(t.behind)}${t.behind && isNumber(t.behind_seconds) ? `, ${seconds(t.behind_seconds)}` : ""}` : "–")],
  ["Rows/s", (t) => short(t.rows_per_second)],
  ["Last commit", (t) => seconds(t.since_commit)],
  ["Dead letters", (t) => short(t.dead_letters)],
  ["Files", (t) => short(t.data_files)],
  ["Delete files", (t) => short(t.delete_files)],
  ["Index", (t) => bytes(t.index_bytes)],
  ["Now", (t) => (t.doing ? `${t.doing.what}, ${seconds(t.doing.for)}` : "")],
];

function row(table) {
  const made = element("tr");
  for (const [label, value] of COLUMNS) {
    const cell = element("td");
    cell.dataset.label = label;
    if (label === "Table") {
      const button = element("button", table.name);
      button.type = "button";
      button.dataset.table = table.number;
      button.setAttribute("aria-expanded", String(opened.has(table.number)));
      button.addEventListener("click", () => toggle(table.number));
      cell.append(button);
      if (table.reason) cell.append(element("div", table.reason, STATUS[table.status]));
    } else {
      cell.textContent = value(table);
      if (label === "Status") cell.className = STATUS[table.status] || "";
      if (label === "Dead letters" && table.dead_letters) cell.className = "bad";
    }
    made.append(cell);
  }
  return made;
}

function detail(table) {
  const made = element("tr", null, "detail");
  const cell = element("td");
  cell.colSpan = COLUMNS.length;
  made.append(cell);
  if (!table) {
    cell.textContent = "…";
    return made;
  }
  const graphs = element("div", null, "charts");
  graphs.append(...charts(table.history, table.step));
  const list = element("dl");
  const add = (name, value) => {
    if (value) list.append(element("dt", name), element("dd", value));
  };
  const pairs = (of, shown = number) => Object.entries(of).map(([name, value]) => `${name} ${shown(value)}`).join(", ");
  add("Source", table.source);
  add("Snapshot", table.snapshot);
  add("Position", table.position);
  add("Micro-batch", isNumber(table.batch) ? String(table.batch) : "");
  add("Changes", pairs(table.rows));
  add("Commits", `${number(table.commits)} of ${number(table.attempts)} attempts`);
  add("Refusals", pairs(table.refusals));
  add("Time in stages", pairs(table.stage_seconds, seconds));
  add("Dead letters", pairs(table.dead_letters_by_class));
  add("Index entries", isNumber(table.index_keys) ? number(table.index_keys) : "");
  add("Behind", table.parts.filter((part) => part.behind).slice(0, 20).map(
    (part) => `${part.part ? `partition ${part.part}: ` : ""}${number(part.behind)}${isNumber(part.seconds) ? `, ${seconds(part.seconds)}` : ""}`,
  ).join("; "));
  cell.append(graphs, list);
  return made;
}

async function toggle(key) {
  if (opened.has(key)) {
    opened.delete(key);
  } else {
    opened.set(key, null);
    await readTable(key);
  }
  showTables();
}

async function readTable(key) {
  const answer = await fetch(`table.json?number=${encodeURIComponent(key)}`, { cache: "no-store" });
  if (opened.has(key)) opened.set(key, answer.ok ? await answer.json() : null);
}

function showTables() {
  if (!state) return;
  const wanted = byId("search").value.trim().toLowerCase();
  const fitting = state.tables.filter((table) => `${table.name}\n${table.source}\n${table.status}`.toLowerCase().includes(wanted));
  const focused = document.activeElement?.dataset?.table; // the rows are made anew
  byId("tables").replaceChildren(
    ...fitting.flatMap((table) => (opened.has(table.number) ? [row(table), detail(opened.get(table.number))] : [row(table)])),
  );
  if (focused) document.querySelector(`button[data-table="${CSS.escape(focused)}"]`)?.focus();
  byId("count").textContent = wanted ? `${fitting.length} of ${state.tables_total}` : state.tables_total;
  const left = state.tables_total - state.tables.length;
  byId("more").textContent = left > 0 ? `${left} more tables aren't shown; those with a problem come first.` : "";
}

function tile(label, value, className) {
  const made = element("div", null, "tile");
  made.append(element("b", value, className), element("span", label, "faint"));
  return made;
}

function show() {
  document.title = `rowdelta ${state.sink}`;
  byId("sink").textContent = state.sink;
  const health = byId("health");
  health.textContent = !state.live ? "not alive" : state.ready ? "ready" : "not ready";
  health.className = `badge ${state.live && state.ready ? "good" : "bad"}`;
  byId("about").textContent = `up ${seconds(state.uptime)}, version ${state.version}, as of ${state.time}`;
  byId("problems").replaceChildren(
    ...[
      ...state.problems,
      ...(state.lags_unknown ? [`How far the tables are behind isn't known: ${state.lags_unknown}`] : []),
      ...(state.engine?.reason ? [state.engine.reason] : []),
      ...(state.slots_unknown ? [`The database's slots aren't known: ${state.slots_unknown}`] : []),
    ].map((text) => element("li", text)),
  );
  const statuses = state.statuses;
  byId("totals").replaceChildren(
    tile("tables work", `${statuses.working || 0} of ${state.tables_total}`, statuses.failed ? "bad" : ""),
    tile("rows a second", short(state.rows_per_second)),
    tile("behind", short(state.behind)),
    tile("dead letters", short(state.dead_letters), state.dead_letters ? "bad" : ""),
    ...(state.engine ? [
      tile("Debezium's engine", state.engine.reading ? "reads" : "doesn't read", state.engine.reading ? "" : "bad"),
      tile("since its last event", seconds(state.engine.since_event)),
      tile(`in the buffer, ${short(state.engine.events)} events`, bytes(state.engine.bytes)),
    ] : []),
    ...state.slots.map((slot) => tile(
      `of the log kept for slot ${slot.name}${slot.is_active ? "" : ", which nobody reads"}`, bytes(slot.retained), slot.is_active ? "" : "bad",
    )),
    ...Object.entries(state.memory).map(([process, size]) => tile(`peak memory, ${process}`, bytes(size))),
  );
  byId("charts").replaceChildren(...charts(state.history, state.step));
  const errors = state.errors.map((error) => {
    const item = element("li");
    item.append(element("div", `${error.time} ${error.table}${error.times > 1 ? ` (${error.times} times)` : ""}`, "faint"), element("div", error.words));
    return item;
  });
  byId("errors").replaceChildren(...(errors.length ? errors : [element("li", "none since the start", "faint")]));
  showTables();
}

async function read() {
  try {
    const answer = await fetch("state.json", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    state = await answer.json();
    await Promise.all([...opened.keys()].map(readTable));
    show();
  } catch {
    const health = byId("health");
    health.textContent = state ? `no answer; the figures are of ${state.time}` : "no answer";
    health.className = "badge bad";
  }
  setTimeout(read, SECONDS * 1000);
}

byId("columns").append(...COLUMNS.map(([label]) => {
  const cell = element("th", label);
  cell.scope = "col";
  return cell;
}));
byId("search").addEventListener("input", showTables);
read();
