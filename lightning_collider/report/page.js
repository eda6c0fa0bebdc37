"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set(); // numbers of the runs that the legend switches off
let axis = 0; // 0: tokens, 1: seconds

const byId = (id) => document.getElementById(id);
const escape = (text) =>
  text.replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const color = (arm) => `var(--series-${arm % 6})`;
const dash = (arm) => ["", "6 4", "2 4"][Math.floor(arm / 6) % 3];

/* ---- numbers ---- */

function short(x) {
  const size = Math.abs(x);
  if (size >= 1e9) return +(x / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return +(x / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(x / 1e3).toPrecision(3) + "k";
  return String(+x.toPrecision(3));
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

/* ---- charts ---- */

function range(series, level) {
  const points = series.flatMap((s) => s.points);
  const right = Math.max(...points.map((p) => p[axis]), 1e-9);
  let late = points.filter((p) => p[axis] >= right / 10);
  if (late.length < 2) late = points;
  const values = late.map((p) => p[2]).concat(level === null ? [] : [level]);
  const low = Math.min(...values), high = Math.max(...values);
  const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  return { right, low: low - room, high: high + room };
}

function draw(box, spec) {
  const series = spec.series.filter((s) => !hidden.has(s.arm) && s.points.length);
  const width = Math.max(box.clientWidth, 200), height = 210;
  const left = 44, top = 8, bottom = height - 24, end = width - 8;
  let inner = "";
  if (series.length) {
    const { right, low, high } = range(series, spec.level);
    const x = (v) => left + ((end - left) * v) / right;
    const y = (v) => bottom - ((bottom - top) * (v - low)) / (high - low);
    for (const t of ticks(low, high, 4))
      inner += `<line class="grid" x1="${left}" x2="${end}" y1="${y(t)}" y2="${y(t)}"/>` +
        `<text x="${left - 7}" y="${y(t) + 4}" text-anchor="end">${spec.percent ? +(t * 100).toPrecision(4) + "%" : short(t)}</text>`;
    for (const t of ticks(0, right, width < 330 ? 3 : 4))
      inner += `<text x="${Math.min(x(t), end - 8)}" y="${height - 7}" text-anchor="middle">${short(t)}</text>`;
    const clip = `clip${box.dataset.number}`;
    inner += `<clipPath id="${clip}"><rect x="${left - 2}" y="${top - 2}" width="${end - left + 6}" height="${bottom - top + 4}"/></clipPath>`;
    if (spec.level !== null)
      inner += `<line class="level" x1="${left}" x2="${end}" y1="${y(spec.level)}" y2="${y(spec.level)}"/>` +
        `<text x="${end}" y="${y(spec.level) - 4}" text-anchor="end">chance</text>`;
    for (const s of series) {
      const line = s.points.map((p, i) => `${i ? "L" : "M"}${x(p[axis]).toFixed(1)} ${y(p[2]).toFixed(1)}`).join("");
      inner += `<path clip-path="url(#${clip})" style="stroke:${color(s.arm)};stroke-dasharray:${dash(s.arm)}" d="${line}"/>`;
    }
    inner += `<line class="rule" y1="${top}" y2="${bottom}" visibility="hidden"/>`;
    box.scale = { left, end, right, width, x };
  }
  box.shown = series;
  box.querySelector("svg")?.remove();
  box.insertAdjacentHTML("beforeend",
    `<svg viewBox="0 0 ${width} ${height}" height="${height}" role="img" aria-label="${escape(spec.title)}">${inner}</svg>`);
}

function point(box, spec, event) {
  const tip = box.querySelector(".tip");
  if (!event || !box.shown?.length) return leave(box);
  const frame = box.getBoundingClientRect(), at = event.clientX - frame.left, { left, end, right, x } = box.scale;
  const value = ((at - left) / (end - left)) * right;
  const nearest = (s) => s.points.reduce((a, b) => (Math.abs(b[axis] - value) < Math.abs(a[axis] - value) ? b : a));
  const rows = box.shown.map((s) => [s, nearest(s)]);
  const where = rows[0][1][axis];
  const form = (v) => (spec.percent ? (v * 100).toFixed(1) + "%" : v.toFixed(3));
  tip.innerHTML = `<b>${short(where)} ${axis ? "s" : "tokens"}</b>` +
    rows.map(([s, p]) => `<div><i style="background:${color(s.arm)}"></i><span>${escape(data.arms[s.arm])}</span><b>${form(p[2])}</b></div>`).join("");
  tip.hidden = false;
  tip.style.left = at < frame.width / 2 ? `${at + 14}px` : "auto";
  tip.style.right = at < frame.width / 2 ? "auto" : `${frame.width - at + 14}px`;
  const rule = box.querySelector(".rule");
  rule.setAttribute("x1", x(where));
  rule.setAttribute("x2", x(where));
  rule.setAttribute("visibility", "visible");
}

function leave(box) {
  box.querySelector(".tip").hidden = true;
  box.querySelector(".rule")?.setAttribute("visibility", "hidden");
}

function drawAll() {
  data.charts.forEach((spec, i) => draw(byId("charts").children[i], spec));
}

function startCharts() {
  data.charts.forEach((spec, number) => {
    const box = document.createElement("div");
    box.className = "chart";
    box.dataset.number = number;
    box.innerHTML = `<h3>${escape(spec.title)}</h3><div class="tip" hidden></div>`;
    box.addEventListener("pointermove", (event) => point(box, spec, event));
    box.addEventListener("pointerdown", (event) => point(box, spec, event));
    box.addEventListener("pointerleave", () => leave(box));
    byId("charts").append(box);
  });
  byId("legend").innerHTML = data.arms.map((name, arm) =>
    `<button data-arm="${arm}" aria-pressed="true"><svg width="22" height="8"><line x1="1" x2="21" y1="4" y2="4" stroke-width="3" style="stroke:${color(arm)};stroke-dasharray:${dash(arm)}"/></svg>${escape(name)}</button>`).join("");
  byId("legend").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const arm = +button.dataset.arm;
    hidden.has(arm) ? hidden.delete(arm) : hidden.add(arm);
    button.setAttribute("aria-pressed", !hidden.has(arm));
    drawAll();
  });
  choice("axis", (button) => { axis = +button.dataset.axis; drawAll(); });
  new ResizeObserver(drawAll).observe(byId("charts"));
  drawAll();
}

/* ---- buttons of which one is pressed ---- */

function choice(id, act) {
  byId(id).addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const other of byId(id).children) other.setAttribute("aria-pressed", other === button);
    act(button);
  });
}

function fill(id, names, pressed) {
  byId(id).innerHTML = names.map((name, i) =>
    `<button data-value="${i}" aria-pressed="${i === pressed}">${escape(name)}</button>`).join("");
  byId(id).hidden = names.length < 2;
}

/* ---- text under the filter ---- */

let sample = 0, record = 0;

function background(score, hasReference) {
  const strength = Math.min(1, Math.abs(score) / (hasReference ? 3 : 9)) * 0.6;
  return `background:rgba(var(--${score < 0 ? "cold" : "hot"}),${strength.toFixed(2)})`;
}

/* Token i of a row was predicted at position i - 1. */
function scoreOf(text, now, row, token) {
  if (token === 0 || !text.has_target[row][token - 1]) return null;
  const loss = now.losses[row][token - 1];
  const reference = text.reference ? text.reference[row][token - 1] : null;
  const dropped = now.keep ? !now.keep[row][token - 1] : false;
  return { loss, reference, dropped, score: reference === null ? loss : loss - reference };
}

function tokenHtml(text, now, row, token) {
  const word = text.tokens[row][token];
  const source = text.sources[row][token];
  const found = scoreOf(text, now, row, token);
  let html = "";
  if (token === 0 || source !== text.sources[row][token - 1])
    html += `<span class="source">${escape(source)}</span>`;
  const shown = word === text.end ? "¶\n" : word.replace(/\n/g, "↵\n");
  const classes = (found?.dropped ? "dropped " : "") + (word === text.end ? "end" : "");
  const style = found ? background(found.score, text.reference) : "";
  return html + `<span class="${classes}" style="${style}" data-row="${row}" data-token="${token}">${escape(shown)}</span>`;
}

function drawText() {
  const text = data.samples[sample], now = text.records[record];
  byId("rows").innerHTML = text.tokens.map((words, row) =>
    `<div class="row">${words.map((_, token) => tokenHtml(text, now, row, token)).join("")}</div>`).join("");
  byId("scale").innerHTML = text.reference
    ? `excess loss, nats: &minus;3 or less <span class="bar"></span> 3 or more`
    : `loss, nats: 0 <span class="bar one"></span> 9 or more`;
  byId("legend-text").textContent =
    (text.reference ? "Excess loss is the model's loss of a token less the reference model's. " : "") +
    (now.keep ? "Struck through: dropped from the backward. " : "Nothing is dropped in this run. ") +
    "It is the same text at each step; ¶ ends a document.";
}

function startText() {
  if (!data.samples.length) return;
  byId("text").hidden = false;
  sample = Math.max(0, data.samples.findIndex((s) => s.reference));
  const steps = () => data.samples[sample].records.map((r) => `step ${r.step.toLocaleString("en")}`);
  const useSample = (number) => {
    sample = number;
    record = data.samples[sample].records.length - 1;
    fill("steps", steps(), record);
    drawText();
  };
  fill("arms", data.samples.map((s) => s.name), sample);
  useSample(sample);
  choice("arms", (button) => useSample(+button.dataset.value));
  choice("steps", (button) => { record = +button.dataset.value; drawText(); });
  for (const kind of ["pointerover", "click"]) byId("rows").addEventListener(kind, tell);
}

function tell(event) {
  const span = event.target.closest("[data-token]");
  if (!span) return;
  document.querySelector(".chosen")?.classList.remove("chosen");
  span.classList.add("chosen");
  const text = data.samples[sample], now = text.records[record];
  const row = +span.dataset.row, token = +span.dataset.token;
  const found = scoreOf(text, now, row, token);
  const word = text.tokens[row][token].replace(/\n/g, "↵");
  const parts = [`step ${now.step}`, `“${word}”`, text.sources[row][token]];
  if (!found) parts.push("is predicted by nothing");
  else {
    parts.push(`loss ${found.loss.toFixed(2)}`);
    if (found.reference !== null)
      parts.push(`reference ${found.reference.toFixed(2)}`, `excess ${found.score.toFixed(2)}`);
    if (now.keep) parts.push(found.dropped ? "dropped" : "kept");
  }
  byId("info").textContent = parts.join(" · ");
}

startCharts();
startText();
