
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const LIGHT = ["#1f4e79", "#b5482a", "#4c8c4a", "#8a5fa8", "#a08020", "#5a6570", "#0f8b8d", "#c2477f"];
const DARK = ["#7db4e8", "#f0906e", "#86c983", "#c7a3e0", "#d8bd5c", "#a9b4bf", "#5fc9cb", "#ef8fbc"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const state = { table: 0, axis: 0, target: 0, hidden: new Set(), sort: null, rankSort: null };

// Everything is made by these two: texts are set as text, and never as markup.
function make(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, does] of Object.entries(value)) made.addEventListener(event, does);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}
function draw(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(1);
  return value.toLocaleString("en", { maximumSignificantDigits: 3 });
}
const tableNow = () => DATA.tables[state.table];
const axisNow = () => DATA.axes[state.axis];
function style(label) {  // a method looks the same on every problem
  const all = [...new Set(DATA.tables.flatMap((t) => t.entries.map((e) => e.label)))];
  const at = all.indexOf(label), colours = dark.matches ? DARK : LIGHT;
  return { colour: colours[at % colours.length], dash: DASHES[Math.floor(at / colours.length) % DASHES.length] };
}
function place(entry, target) {  // where an entry reaches a target, on the axis that is shown
  const reached = entry.reached[target];
  return reached && reached.at && axisNow().key in reached.at ? reached.at[axisNow().key] : null;
}

function chosen(label, options, key) {
  const box = make("select", { on: { change: (event) => {
    state[key] = Number(event.target.value);
    if (key === "table") state.target = Math.min(state.target, Math.max(0, tableNow().targets.length - 1));
    show();
  } } });
  options.forEach((text, at) => box.append(make("option", { value: at, ...(at === state[key] ? { selected: "" } : {}) }, text)));
  return make("label", {}, label, box);
}

function ticks(low, high, count) {
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find((each) => each * unit >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}
function decades(low, high) {
  const found = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const step = Math.max(1, Math.ceil((last - first) / 8));
  for (let at = first; at <= last; at += step) found.push(10 ** at);
  return found.filter((each) => each >= low * 0.999 && each <= high * 1.001);
}

function chart() {
  const table = tableNow(), axis = axisNow(), narrow = innerWidth < 600;
  const W = narrow ? 380 : 960, H = narrow ? 300 : 400;
  const left = 58, right = 12, top = 12, bottom = 46;
  const shown = table.entries.filter((e) => e.curve && e.curve.x[axis.key] && !state.hidden.has(e.label));
  const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  svg.append(draw("title", {}, `${table.metric} against ${axis.label}, ${table.title}`));
  const usable = (value) => value !== null && Number.isFinite(value) && (!table.log || value > 0);
  const xs = shown.flatMap((e) => e.curve.x[axis.key].filter(Number.isFinite));
  const ys = shown.flatMap((e) => e.curve.mid.filter(usable)).concat(shown.length ? table.targets.filter(usable) : []);
  if (!xs.length || !ys.length) {
    svg.append(draw("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "no curve is shown"));
    return svg;
  }
  // Methods differ much in the bytes, work and seconds of a round. The axis ends where the middle one ends, times three.
  const ends = shown.map((e) => Math.max(...e.curve.x[axis.key].filter(Number.isFinite))).sort((a, b) => a - b);
  const xHigh = Math.min(ends[ends.length - 1], 3 * ends[Math.floor(ends.length / 2)]) || 1;
  let low = Math.min(...ys), high = Math.max(...ys);
  if (table.log) { high = Math.min(high, 30 * Math.max(...shown.map((e) => e.curve.mid.find(usable) || low))); low = Math.max(low, high * 1e-9); }
  if (high <= low) { high = table.log ? low * 10 : low + 1; }
  const scaleX = (x) => left + (W - left - right) * x / xHigh;
  const level = table.log ? Math.log10 : (y) => y;
  const scaleY = (y) => {
    const at = top + (H - top - bottom) * (1 - (level(y) - level(low)) / (level(high) - level(low)));
    return Math.max(top - 40, Math.min(H - bottom + 40, at));
  };
  for (const y of table.log ? decades(low, high) : ticks(low, high, 5)) {
    svg.append(draw("line", { class: "grid", x1: left, x2: W - right, y1: scaleY(y), y2: scaleY(y) }));
    const text = table.log ? (y >= 0.01 && y < 1000 ? short(y) : `1e${Math.round(Math.log10(y))}`) : short(y);
    svg.append(draw("text", { x: left - 6, y: scaleY(y) + 4, "text-anchor": "end" }, text));
  }
  for (const x of ticks(0, xHigh, narrow ? 4 : 8)) {
    svg.append(draw("text", { x: scaleX(x), y: H - bottom + 18, "text-anchor": "middle" }, short(x)));
  }
  svg.append(draw("text", { x: (left + W - right) / 2, y: H - 8, "text-anchor": "middle" }, axis.label));
  const clip = draw("clipPath", { id: "inside" });
  clip.append(draw("rect", { x: left, y: top - 2, width: W - left - right, height: H - top - bottom + 4 }));
  const inside = draw("g", { "clip-path": "url(#inside)" });
  svg.append(clip, inside);
  const target = table.targets[state.target];
  if (usable(target)) inside.append(draw("line", { class: "target", x1: left, x2: W - right, y1: scaleY(target), y2: scaleY(target) }));
  for (const entry of shown) {
    const { colour, dash } = style(entry.label), curve = entry.curve, x = curve.x[axis.key];
    const at = x.map((_, i) => i).filter((i) => Number.isFinite(x[i]) && usable(curve.mid[i]));
    const point = (i, y) => `${scaleX(x[i]).toFixed(1)},${scaleY(y).toFixed(1)}`;
    const banded = at.filter((i) => usable(curve.low[i]) && usable(curve.high[i]));
    if (banded.some((i) => curve.low[i] !== curve.high[i])) {
      const band = banded.map((i) => point(i, curve.high[i])).concat([...banded].reverse().map((i) => point(i, curve.low[i])));
      inside.append(draw("polygon", { points: band.join(" "), fill: colour, "fill-opacity": .12, stroke: "none" }));
    }
    const line = draw("polyline", { points: at.map((i) => point(i, curve.mid[i])).join(" "), fill: "none",
      stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash });
    line.append(draw("title", {}, entry.label));
    inside.append(line);
  }
  return svg;
}

function legend() {
  const box = make("div", { class: "legend", role: "group", "aria-label": "curves" });
  for (const entry of tableNow().entries) {
    if (!entry.curve) continue;
    const { colour, dash } = style(entry.label), mark = draw("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" });
    mark.append(draw("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: colour, "stroke-width": 3, "stroke-dasharray": dash }));
    box.append(make("button", { type: "button", "aria-pressed": String(!state.hidden.has(entry.label)), on: { click: () => {
      state.hidden.has(entry.label) ? state.hidden.delete(entry.label) : state.hidden.add(entry.label);
      show();
    } } }, mark, entry.label));
  }
  return box;
}

function specLink(table, entry, text, kind) {
  if (!entry.spec) return make("span", { class: kind }, text);
  return make("a", { href: `#spec-${encodeURIComponent(table.name)}-${encodeURIComponent(entry.label)}`, class: kind,
    title: `the spec of ${entry.label}`, on: { click: (event) => { event.preventDefault(); openSpec(table, entry); } } }, text);
}
function openSpec(table, entry) {
  const box = document.getElementById("spec");
  box.querySelector("h2").textContent = `${entry.label}, ${table.title}`;
  box.querySelector("pre").textContent = entry.spec;
  if (box.open) box.close();
  box.showModal();
}

// A table that is sorted by the column that is pressed. A column: its name, the value of a row, how it is shown.
function sorted(columns, rows, key) {
  const by = state[key] || { column: columns.findIndex((c) => c.first), down: false };
  const column = columns[by.column] || columns[0];
  const rank = (row) => { const value = column.value(row); return value === null || value === undefined || value === "" ? Infinity : value; };
  const order = [...rows].sort((a, b) => {
    const x = rank(a), y = rank(b);
    if (x === Infinity || y === Infinity) return x === y ? 0 : x === Infinity ? 1 : -1;
    const way = typeof x === "string" || typeof y === "string" ? String(x).localeCompare(String(y)) : x - y;
    return by.down ? -way : way;
  });
  const head = make("tr");
  columns.forEach((c, at) => head.append(make("th", { class: c.kind || null, "aria-sort": at === by.column ? (by.down ? "descending" : "ascending") : null },
    make("button", { type: "button", on: { click: () => {
      state[key] = { column: at, down: at === by.column ? !by.down : false };
      show();
    } } }, c.name + (at === by.column ? (by.down ? " ▾" : " ▴") : "")))));
  const body = make("tbody");
  for (const row of order) {
    const line = make("tr", row.entry && row.entry.control ? { class: "control" } : {});
    for (const c of columns) line.append(make("td", { class: c.kind || null }, c.cell(row)));
    body.append(line);
  }
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, head), body));
}

function results() {
  const table = tableNow(), rows = table.entries.map((entry) => ({ entry }));
  const linked = (row, text, kind) => specLink(table, row.entry, text, kind);
  const columns = [{ name: "method", value: (r) => r.entry.label, cell: (r) => linked(r, r.entry.label) }];
  table.targets.forEach((target, at) => {
    const best = Math.min(...table.entries.filter((e) => !e.control).map((e) => place(e, at) ?? Infinity));
    columns.push({ name: `to ${short(target)}`, first: at === state.target, value: (r) => place(r.entry, at), cell: (r) => {
      const reached = r.entry.reached[at], value = place(r.entry, at);
      if (value === null) return linked(r, !reached ? "" : reached.forbidden ? "floor" : reached.there ? `${reached.there}/${reached.runs}` : "no", "never");
      return linked(r, short(value) + (reached.there < reached.runs ? ` (${reached.there}/${reached.runs})` : ""), value === best ? "best" : "");
    } });
  });
  const facts = [...new Set(table.entries.flatMap((e) => Object.keys(e.facts)))];
  for (const name of facts) {
    columns.push({ name, value: (r) => r.entry.facts[name], cell: (r) => {
      const value = r.entry.facts[name];
      return linked(r, typeof value === "number" && name.startsWith("grid within") ? `${Math.round(100 * value)} %` : short(value));
    } });
  }
  const settings = (e) => Object.entries(e.settings).map(([k, v]) => `${k} ${short(v)}`).join(", ");
  if (table.entries.some((e) => settings(e))) columns.push({ name: "settings", kind: "text", value: (r) => settings(r.entry), cell: (r) => linked(r, settings(r.entry)) });
  if (table.entries.some((e) => e.note)) columns.push({ name: "note", kind: "text wide", value: (r) => r.entry.note, cell: (r) => r.entry.note });
  return sorted(columns, rows, "sort");
}

function ranks() {
  const labels = [...new Set(DATA.tables.flatMap((t) => t.entries.map((e) => e.label)))];
  const found = DATA.tables.map((table) => {
    const target = Math.min(state.target, table.targets.length - 1);
    const there = table.entries.map((e) => place(e, target)).filter((v) => v !== null).sort((a, b) => a - b);
    return new Map(table.entries.map((e) => { const v = place(e, target); return [e.label, { entry: e, rank: v === null ? null : there.indexOf(v) + 1 }]; }));
  });
  const rows = labels.map((label) => {
    const own = found.map((ranked) => ranked.get(label));
    const counted = own.map((each, at) => each && each.rank !== null ? each.rank : each && each.entry.reached.length ? found[at].size : null).filter((v) => v !== null);
    return { label, own, entry: own.map((o) => o && o.entry).find((e) => e), reached: own.filter((o) => o && o.rank !== null).length,
      mean: counted.length ? counted.reduce((a, b) => a + b, 0) / counted.length : null };
  });
  const columns = [
    { name: "method", value: (r) => r.label, cell: (r) => document.createTextNode(r.label) },
    { name: "mean rank", first: true, value: (r) => r.mean, cell: (r) => document.createTextNode(r.mean === null ? "" : r.mean.toFixed(1)) },
    { name: "reached", value: (r) => -r.reached, cell: (r) => document.createTextNode(`${r.reached} of ${DATA.tables.length}`) },
    ...DATA.tables.map((table, at) => ({ name: table.name, value: (r) => r.own[at] ? r.own[at].rank : null, cell: (r) => {
      const own = r.own[at];
      if (!own) return document.createTextNode("");
      const reached = own.entry.reached[Math.min(state.target, table.targets.length - 1)];
      const text = own.rank !== null ? String(own.rank) : reached && reached.forbidden ? "floor" : reached ? "no" : "–";
      return specLink(table, own.entry, text, own.rank === 1 ? "best" : own.rank === null ? "never" : "");
    } })),
  ];
  return sorted(columns, rows, "rankSort");
}

function show() {
  const table = tableNow(), targets = table.targets.map((t) => `${table.mode === "min" ? "at most" : "at least"} ${short(t)}`);
  const parts = [make("div", { class: "choices" },
    DATA.tables.length > 1 ? chosen("problem", DATA.tables.map((t) => t.title), "table") : null,
    chosen("axis", DATA.axes.map((a) => a.label), "axis"),
    targets.length ? chosen("target", targets, "target") : null)];
  parts.push(make("p", { class: "metric" }, `${table.metric}${table.log ? ", logarithmic" : ""}; line: median, band: 20 to 80 %`));
  parts.push(chart(), legend());
  if (table.note) parts.push(make("p", { class: "note" }, `${table.note}.`));
  parts.push(make("h2", {}, targets.length ? `${axisNow().label[0].toUpperCase()}${axisNow().label.slice(1)} until a target is reached for good` : "Runs"), results());
  if (targets.length) {
    parts.push(make("p", { class: "note" }, "“floor”: where the chosen settings end is above the target, so more rounds would not help. “no”: not within the budget. “2/5”: so many of the seeds. Controls are in italics: they solve another problem. Every number is a link to its spec."));
  }
  if (targets.length && DATA.tables.length > 1) parts.push(make("h2", {}, `Ranks, ${axisNow().label}, ${targets[state.target]}`), ranks());
  document.getElementById("board").replaceChildren(...parts);
}
dark.addEventListener("change", show);
addEventListener("resize", show);
show();
