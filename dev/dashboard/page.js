// The page of dev/dashboard.py: asks for what is new every two seconds, and draws it. runs.py says what curves, buckets and
// events are. What runs have written goes to the page as text only, never as HTML.
"use strict";

// The colours of Okabe and Ito: of runs and hosts, on white and on black; and more for parts of a whole.
const COLORS = {light: ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000"],
                dark: ["#56B4E9", "#E69F00", "#00B886", "#CC79A7", "#F0E442", "#D55E00", "#FFFFFF"]};
const PARTS = ["#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#F0E442", "#56B4E9", "#009E73", "#999999", "#882255", "#117733",
               "#AA4499", "#44AA99", "#332288"];
const AXES = {steps: ["step", ","], tokens: ["tokens", "~s"], hours: ["hours", ""], cost: ["dollars", ""]};
const LABELS = {comm_exposed_ms: "waiting for communication, ms", comm_ms: "in collectives, ms", step_ms: "step, ms",
                "gpu.temperature_c": "temperature, °C", "gpu.power_w": "power, W", "gpu.sm_mhz": "clock, MHz"};
const WORST_IS_LOW = ["gpu.utilisation", "gpu.sm_mhz", "gpu.memory_mhz"];
const GIB = 2 ** 30, byId = id => document.getElementById(id), runs = new Map();
let axis = "steps", since = "", theme = "light", log = true, chosen = null;

const shown = () => [...runs.values()].filter(run => !run.hidden);
const color = run => COLORS[theme][[...runs.values()].indexOf(run) % 7];

function take(news) {
  const run = runs.get(news.name) ?? {name: news.name};
  runs.set(news.name, run);
  if (news.cleared || !run.curves) Object.assign(run, {curves: {}, events: []});
  for (const [name, [first, added]] of Object.entries(news.curves))
    run.curves[name] = (run.curves[name] ?? []).slice(0, first).concat(added);
  Object.assign(run, {state: news.state, text: news.text, share: news.share, figures: news.figures,
    events: [...run.events, ...news.events].slice(-500), plan: news.plan ?? run.plan});
  return news.cleared || news.plan || news.events.length || Object.keys(news.curves).length;
}

// All points of a curve, and the means of its buckets, as steps and values; null for a value that was not finite.
function points(run, name) {
  const raw = {steps: [], values: []}, means = {steps: [], values: [], counts: []};
  const add = (to, step, value) => { to.steps.push(step); to.values.push(value); };
  for (const [count, ...bucket] of run.curves[name] ?? []) {
    const [mean, lowStep, low, highStep, high] = count > 1 ? bucket : [bucket[1] ?? null, bucket[0] ?? raw.steps.at(-1)];
    if (count < 2 || lowStep !== highStep) add(raw, ...count > 1 && highStep < lowStep ? [highStep, high] : [lowStep, count > 1 ? low : mean]);
    if (count > 1) add(raw, ...highStep < lowStep ? [lowStep, low] : [highStep, high]);
    add(means, count > 1 ? (lowStep + highStep) / 2 : lowStep, mean);
    means.counts.push(count);
  }
  return {raw, means};
}

// A function of the step: a rising curve between its points, 0 before the first one.
function between({steps, values}) {
  return step => {
    let low = -1, high = steps.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    if (low < 0 || high === steps.length) return low < 0 ? 0 : values[low];
    return values[low] + (step - steps[low]) / (steps[high] - steps[low]) * (values[high] - values[low]);
  };
}
const toAxis = run => axis === "steps" ? step => step : between(points(run, axis).raw);

// The mean of each value and its neighbours, so many of a hundred as the slider says; gaps are left out of it.
function smooth({values, counts}) {
  const reach = Math.round(values.length * byId("smoothing").value / 200), sums = [0], weights = [0];
  values.forEach((value, i) => {
    sums.push(sums[i] + value * counts[i]);
    weights.push(weights[i] + counts[i]);
  });
  return values.map((value, i) => {
    const begin = Math.max(0, i - reach), end = Math.min(values.length, i + reach + 1);
    return value === null ? null : (sums[end] - sums[begin]) / (weights[end] - weights[begin]);
  });
}

// ---- Panels: each makes traces of plotly, what is special in its layout, and the keys beside its title.
const DOTS = ["solid", "dot"];
const line = (steps, y, x, name, paint, more = {}) => ({x: steps.map(x), y, name, type: "scatter", mode: "lines", ...more,
  line: {color: paint, width: 2, ...more.line}});

function curve(name, format, {logs = false, faint = true, range = "normal"} = {}) {
  return () => ({traces: shown().filter(run => run.curves[name]).flatMap(run => {
    const {raw, means} = points(run, name), x = toAxis(run), paint = color(run);
    const strong = line(means.steps, faint ? smooth(means) : means.values, x, run.name, paint);
    return faint ? [line(raw.steps, raw.values, x, run.name, paint, {opacity: 0.3, hoverinfo: "skip", line: {width: 1}}), strong] : [strong];
  }), layout: {yaxis: {hoverformat: format, tickformat: format.replace(".4f", ""), rangemode: range,
    ...logs && log ? {type: "log", dtick: "D2"} : {}}}});
}

function losses() {
  const {traces, layout} = curve("loss", ".4f", {logs: true})(), sets = [], symbols = ["circle", "square", "star"];
  for (const run of shown()) {
    const x = toAxis(run), {means} = points(run, "loss"), y = between({...means, values: smooth(means)});
    for (const name of Object.keys(run.curves).filter(name => name.startsWith("val_loss"))) {
      const {raw} = points(run, name), set = name.slice(9) || "validation", number = sets.includes(set) ? sets.indexOf(set) : sets.push(set) - 1;
      traces.push(line(raw.steps, raw.values, x, `${run.name}, ${set}`, color(run),
        {mode: "lines+markers", line: {width: 1, dash: "dot"}, marker: {symbol: symbols[number % 3], size: 7}}));
    }
    const events = run.events.filter(event => event[1] !== "sample");
    traces.push(line(events.map(event => event[0]), events.map(event => y(event[0]) || null), x, run.name, "#D55E00", {mode: "markers",
      text: events.map(event => wrapped(`${event[1]}: ${event[2]}`)), hovertemplate: "%{text}<extra></extra>",
      marker: {symbol: "triangle-down", size: 14, color: "#D55E00", line: {width: 1.5, color: theme === "dark" ? "#fff" : "#000"}}}));
  }
  return {traces, layout, keys: [["each step, and smoothed", "var(--faint)", "line"], ...sets.map(set => [set, "var(--faint)", "dot"]),
    ...shown().some(run => run.events.length) ? [["incident", "#D55E00", "dot"]] : []]};
}

// Text for plotly, which takes some tags for its own.
const wrapped = text => (text.match(/.{1,70}(\s|$)|.{1,70}/g) ?? []).join("\n").replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/\n+/g, "<br>");

function times(run) {
  const names = Object.keys(run.curves).filter(name => name.startsWith("time ") && name !== "time wall"), x = toAxis(run);
  const all = points(run, "time wall").raw.steps, every = Math.ceil(all.length / 150);
  const steps = all.filter((_, i) => i % every === every - 1 || i === all.length - 1);
  const spent = name => { const at = between(points(run, name).raw); return steps.map((step, i) => at(step) - (i ? at(steps[i - 1]) : 0)); };
  const parts = names.map(name => [name.slice(5).replace("lost.", "").replace("exposed.", "exposed: "), spent(name)]);
  const wall = spent("time wall");
  parts.push(["other", wall.map((seconds, i) => Math.max(0, parts.reduce((rest, [, part]) => rest - part[i], seconds)))]);
  const sum = list => list.reduce((one, other) => one + other, 0), whole = sum(parts.map(([, part]) => sum(part)));
  const drawn = parts.filter(([, part]) => sum(part) / whole >= 0.0005);
  return {traces: drawn.map(([name, part], i) => line(steps, part, x, name, PARTS[i % 13], {stackgroup: "all", groupnorm: "percent",
    fillcolor: PARTS[i % 13], line: {width: 0}, hovertemplate: "%{y:.1f} %"})),
    keys: drawn.map(([name, part], i) => [`${name} ${(100 * sum(part) / whole).toFixed(1)} %`, PARTS[i % 13]]),
    layout: {yaxis: {ticksuffix: " %", range: [0, 100], fixedrange: true}}};
}

function memory(run) {
  const ranks = (run.plan?.ranks ?? []).slice(0, 8), y = ranks.map(rank => `rank ${rank.rank} `);
  const names = [...new Set(ranks.flatMap(rank => Object.keys(rank.memory)))], measured = points(run, "rank 0 gpu.memory_bytes").raw.steps.length;
  const traces = names.map((name, i) => ({y, x: ranks.map(rank => (rank.memory[name] ?? 0) / GIB), name, type: "bar", orientation: "h",
    marker: {color: PARTS[i % 13]}, hovertemplate: "%{x:.3~g} GiB"}));
  const keys = names.map((name, i) => [name, PARTS[i % 13]]), room = measured && run.plan.device.bytes / GIB;
  if (measured) {
    const most = ranks.map(rank => Math.max(...points(run, `rank ${rank.rank} gpu.memory_bytes`).raw.values) / GIB);
    traces.push({y, x: most, name: "measured, at most", mode: "markers", hovertemplate: "%{x:.4~g} GiB",
      marker: {symbol: "line-ns", size: 18, line: {width: 4, color: theme === "dark" ? "#fff" : "#000"}}});
    keys.push(["measured, at most", "var(--text)", "line"], ["the device's", "#D55E00", "dash"]);
  }
  return {traces, keys, layout: {barmode: "stack", bargap: 0.35, hovermode: "y unified", yaxis: {autorange: "reversed", fixedrange: true},
    xaxis: {title: {text: "GiB"}, tickformat: "", rangemode: "tozero"},
    shapes: room ? [{type: "line", x0: room, x1: room, y0: 0, y1: 1, yref: "paper", line: {dash: "dot", color: "#D55E00"}}] : []}};
}

// Of each bucket, the value that is worst.
function ranks(run, {select}) {
  const found = Object.keys(run.curves).filter(name => name.startsWith("rank ")).map(name => name.split(" "));
  const known = new Set([...Object.keys(LABELS), ...found.map(([, , name]) => name)].filter(name => found.some(one => one[2] === name)));
  fill(select, [...known].map(name => [name, LABELS[name] ?? name.replace("gpu.", "").replaceAll("_", " ")]));
  const rows = found.filter(([, , name]) => name === select.value).map(name => [name[1], run.curves[name.join(" ")]]);
  const value = ([count, ...bucket]) => count < 2 ? bucket[1] : bucket[WORST_IS_LOW.includes(select.value) ? 2 : 4];
  return {traces: rows.length ? [{type: "heatmap", x: rows[0][1].map(bucket => bucket[bucket.length > 3 ? 4 : 1]).map(toAxis(run)),
    y: rows.map(([rank]) => `rank ${rank} `), z: rows.map(([, curve]) => curve.map(value)), ygap: 1, hovertemplate: "%{y}: %{z:.4~g}<extra></extra>",
    colorscale: theme === "dark" ? "Viridis" : "YlGnBu", reversescale: theme !== "dark", colorbar: {thickness: 12, outlinewidth: 0, tickformat: "~s"}}] : [],
    layout: {hovermode: "closest", yaxis: {autorange: "reversed", fixedrange: true, dtick: rows.length > 16 ? null : 1}}};
}

// names: of numbers of each host, and what they are called
function hosts(names, format) {
  return run => {
    const all = [...new Set(Object.keys(run.curves).filter(name => name.startsWith("host ")).map(name => name.split(" ")[1]))];
    const traces = all.flatMap((host, i) => Object.entries(names).map(([name, label], j) => {
      const {steps, values} = points(run, `host ${host} ${name}`).raw;
      return line(steps, values, toAxis(run), `${host} ${label}`, COLORS[theme][i % 7], {line: {dash: DOTS[j]}});
    }));
    const keys = Object.values(names).filter(label => label).map((label, j) => [label, "var(--faint)", ["line", "dash"][j]]);
    return {traces, keys: [...all.map((host, i) => [host, COLORS[theme][i % 7], "line"]), ...keys],
      layout: {yaxis: {tickformat: format, rangemode: "tozero"}}};
  };
}

function element(kind, text = "", name = "", inner = []) {
  const made = Object.assign(document.createElement(kind), {textContent: text, className: name});
  made.append(...inner);
  return made;
}

const texts = (isWanted, kind) => run => ({texts: run.events.filter(isWanted).reverse().map(([step, what, text]) =>
  element("p", "", "", [element("b", `${what} at step ${step.toLocaleString("en")}`), element(kind, text)]))});

const PANELS = [
  ["wide", "loss", "Loss, nats per token", losses], ["third", "norm", "Gradient norm", curve("grad_norm", ".3~g", {logs: true})],
  ["third", "lr", "Learning rate", curve("lr", ".2~e", {faint: false})],
  ["third", "rate", "Tokens per second", curve("tokens_per_s", ".4~s", {range: "tozero"})],
  ["half", "mfu", "MFU", curve("mfu", ".3~%", {range: "tozero"})],
  ["half", "goodput", "Goodput", curve("goodput", ".3~%", {faint: false, range: "tozero"})],
  ["half detail", "times", "Where time goes", times], ["half detail", "memory", "Memory of ranks", memory],
  ["wide detail low", "ranks", "Ranks", ranks], ["third detail", "cpu", "CPU load", hosts({cpu: ""}, "~%")],
  ["third detail", "network", "Network, bytes/s", hosts({"network_bytes_per_s.in": "in", "network_bytes_per_s.out": "out"}, "~s")],
  ["third detail", "disk", "Disk, bytes/s", hosts({"disk_bytes_per_s.read": "read", "disk_bytes_per_s.write": "written"}, "~s")],
  ["half detail texts", "incidents", "Incidents and warnings", texts(event => event[1] !== "sample", "span")],
  ["half detail texts", "samples", "Samples", texts(event => event[1] === "sample", "pre")],
].map(([kind, id, title, make]) => {
  const keys = element("div", "", "keys"), plot = element("div", "", "plot"), select = element("select");
  byId(kind.includes("detail") ? "details" : "curves").append(
    Object.assign(element("article", "", kind, [element("h3", title), ...id === "ranks" ? [select] : [], keys, plot])));
  plot.id = id;
  select.ariaLabel = "what to show of ranks";
  select.onchange = draw;
  return {make, select, keys, plot};
});

function drawPanel(panel) {
  const {traces = [], layout = {}, keys = [], texts} = panel.make(runs.get(chosen), panel);
  if (panel.plot.parentNode.hidden = !(texts ?? (window.Plotly ? traces : [])).length) return;
  panel.keys.replaceChildren(...keys.map(([label, paint, kind = ""]) => {
    const key = element("span", label, kind);
    key.style.setProperty("--key", paint);
    return key;
  }));
  if (texts) return panel.plot.replaceChildren(...texts);
  const css = getComputedStyle(document.documentElement), of = name => css.getPropertyValue(name).trim();
  const both = {gridcolor: of("--line"), zerolinecolor: of("--line"), automargin: true, exponentformat: "SI"};
  Plotly.react(panel.plot, traces, {paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false, uirevision: axis,
    hovermode: "x unified", hoverlabel: {bgcolor: of("--panel"), bordercolor: of("--line"), font: {color: of("--text")}},
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", margin: {l: 46, r: 12, t: 12, b: 36},
    font: {color: of("--faint"), size: 12, family: getComputedStyle(document.body).fontFamily}, ...layout,
    xaxis: {...both, title: {text: AXES[axis][0], standoff: 6}, tickformat: AXES[axis][1], ...layout.xaxis},
    yaxis: {...both, ...layout.yaxis}}, {displayModeBar: false, responsive: true});
}

function makeCard(run) {
  const name = element("button", run.name, "name");
  name.title = "show or hide its curves";
  name.onclick = () => { run.hidden = !run.hidden; draw(); };
  const card = element("section", "", "", [element("div", "", "top", [name, element("span")]), element("progress"), element("dl")]);
  byId("cards").append(card);
  return card;
}

function drawCards() {
  for (const run of runs.values()) {
    const card = run.card ??= makeCard(run), [{children: [name, state]}, bar, list] = card.children;
    card.className = run.hidden ? "card off" : "card";
    card.style.setProperty("--run", color(run));
    name.ariaPressed = String(!run.hidden);
    Object.assign(state, {textContent: run.text, className: `state ${run.state}`});
    Object.assign(bar, {hidden: run.share === null, value: run.share ?? 0});
    list.replaceChildren(...run.figures.map(([label, value, note]) =>
      element("div", "", "", [element("dt", label), element("dd", value, "value"), element("dd", note, "note")])));
  }
}

function fill(select, options) {
  const before = select.value;
  if (options.length === select.options.length) return;
  select.replaceChildren(...options.map(([value, label]) => new Option(label, value)));
  if (options.some(([value]) => value === before)) select.value = before;
}

function draw() {
  drawCards();
  if (!runs.size) return;
  chosen ??= [...runs.keys()].at(-1);
  fill(byId("chosen"), [...runs.keys()].map(name => [name, name]));
  byId("chosen").value = chosen;
  byId("detail").hidden = runs.size < 2;
  for (const button of byId("axes").children) {
    button.hidden = button.value !== "steps" && !shown().some(run => run.curves[button.value]);
    button.ariaPressed = String(button.value === axis);
  }
  byId("log").ariaPressed = String(log);
  PANELS.forEach(drawPanel);
}

async function poll() {
  let wait = document.hidden ? 15000 : 2000;
  try {
    const answer = await (await fetch(`data?${since}`)).json();
    since = answer.since;
    if (answer.runs.map(take).some(isNew => isNew)) draw(); else drawCards();
    const {share = null, name = "gpt.cu"} = runs.get(chosen) ?? {};
    document.title = (share === null ? "" : `${Math.floor(100 * share)} % · `) + name;
    byId("connection").textContent = answer.more ? "reading ..." : "";
    if (answer.more) wait = 0;
  } catch (error) {
    byId("connection").textContent = `no answer from dashboard.py (${error.message})`;
  }
  setTimeout(poll, wait);
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = theme = isDark ? "dark" : "light";
  draw();
}

for (const name of Object.keys(AXES)) {
  const button = element("button", name === "cost" ? "dollars" : name);
  button.value = name;
  button.onclick = () => { axis = name; draw(); };
  byId("axes").append(button);
}
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.onchange = () => setTheme(dark.matches);
byId("theme").onclick = () => setTheme(theme === "light");
byId("smoothing").oninput = draw;
byId("log").onclick = () => { log = !log; draw(); };
byId("chosen").onchange = () => { chosen = byId("chosen").value; draw(); };
setTheme(dark.matches);
poll();
