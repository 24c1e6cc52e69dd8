// The page of dev/dashboard.py: asks for what is new every two seconds, and draws it. runs.py says what curves, buckets
// and events are. What runs have written goes to the page as text only, never as HTML.
"use strict";

// The colours of Okabe and Ito for runs and hosts, on white and on black, and some more for parts of a whole.
const COLORS = {light: ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000"],
                dark: ["#56B4E9", "#E69F00", "#00B886", "#CC79A7", "#F0E442", "#D55E00", "#FFFFFF"]};
const PARTS = "0072B2 E69F00 D55E00 CC79A7 F0E442 56B4E9 009E73 999999 882255 44AA99".split(" ").map(one => `#${one}`);
const AXES = {steps: ["step", ","], tokens: ["tokens", "~s"], hours: ["hours", ""], cost: ["dollars", ""]};
const NETWORK = {"network_bytes_per_s.in": "in", "network_bytes_per_s.out": "out"};
const DISK = {"disk_bytes_per_s.read": "read", "disk_bytes_per_s.write": "written"};
const WORST_IS_LOW = ["gpu.utilisation", "gpu.sm_mhz", "gpu.memory_mhz"];
const byId = id => document.getElementById(id), runs = new Map();
let axis = "steps", since = "", theme = "light", log = true, chosen = null;

const shown = () => [...runs.values()].filter(run => !run.hidden);
const color = run => COLORS[theme][[...runs.values()].indexOf(run) % 7];
const part = i => PARTS[i % PARTS.length];
const contrast = () => theme === "dark" ? "#fff" : "#000";
const sum = list => list.reduce((one, other) => one + other, 0);

function take(news) {
  const run = runs.get(news.name) ?? {};
  runs.set(news.name, run);
  if (news.cleared || !run.curves) Object.assign(run, {curves: {}, events: []});
  for (const [name, [first, added]] of Object.entries(news.curves))
    run.curves[name] = (run.curves[name] ?? []).slice(0, first).concat(added);
  const {curves, plan} = run, events = [...run.events, ...news.events].slice(-500);
  Object.assign(run, news, {curves, events, plan: news.plan ?? plan});
  return news.cleared || news.plan || news.events.length || Object.keys(news.curves).length;
}

// All points of a curve, and the means of its buckets. A value that was not finite is null.
function points(run, name) {
  const raw = {steps: [], values: []}, means = {steps: [], values: [], counts: []};
  for (const [count, mean, ...ends] of run.curves[name] ?? []) {
    ends.forEach((one, i) => (i % 2 ? raw.values : raw.steps).push(one));
    means.steps.push((ends[0] + ends.at(-2)) / 2);
    means.values.push(mean);
    means.counts.push(count);
  }
  return {raw, means};
}

// A function of the step: a curve that rises, between its points; 0 before the first one.
function between({steps, values}) {
  return step => {
    let low = -1, high = steps.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    if (low < 0 || high === steps.length) return values[low] ?? 0;
    return values[low] + (step - steps[low]) / (steps[high] - steps[low]) * (values[high] - values[low]);
  };
}
const toAxis = run => axis === "steps" ? step => step : between(points(run, axis).raw);

// The mean of each value and its neighbours, so many of a hundred as the slider says; gaps are left out of it.
function smooth({values, counts}) {
  const reach = Math.round(values.length * byId("smoothing").value / 200), sums = [0], weights = [0];
  values.forEach((value, i) => sums.push(sums[i] + value * counts[i]) && weights.push(weights[i] + counts[i]));
  return values.map((value, i) => {
    const begin = Math.max(0, i - reach), end = Math.min(values.length, i + reach + 1);
    return value === null ? null : (sums[end] - sums[begin]) / (weights[end] - weights[begin]);
  });
}

// ---- Panels: each makes traces of plotly, keys (label, colour, sign), and what is special in its layout.
const line = (run, {steps, values}, name, paint, more = {}) => ({x: steps.map(toAxis(run)), y: values, name,
  mode: "lines", type: "scatter", ...more, line: {color: paint, width: 2, ...more.line}});

const curve = (name, format, {logs = false, faint = true, from = "normal"} = {}) => () => [
  shown().filter(run => run.curves[name]).flatMap(run => {
    const {raw, means} = points(run, name), strong = {steps: means.steps, values: faint ? smooth(means) : means.values};
    return [...faint ? [line(run, raw, "", color(run), {opacity: 0.3, hoverinfo: "skip", line: {width: 1}})] : [],
      line(run, strong, run.name, color(run))];
  }), [], {yaxis: {hoverformat: format, tickformat: format.replace(/^.\d/, ".3"), rangemode: from,
    type: logs && log ? "log" : "linear"}}];

function losses() {
  const [traces, , layout] = curve("loss", ".5~g", {logs: true})(), sets = [], symbols = ["circle", "square", "star"];
  for (const run of shown()) {
    for (const name of Object.keys(run.curves).filter(name => name.startsWith("val_loss"))) {
      if (!sets.includes(name)) sets.push(name);
      const marker = {symbol: symbols[sets.indexOf(name) % 3], size: 7};
      traces.push(line(run, points(run, name).raw, `${run.name}, ${name}`, color(run),
        {mode: "lines+markers", line: {width: 1, dash: "dot"}, marker}));
    }
    const {means} = points(run, "loss"), at = between({...means, values: smooth(means)});
    const events = run.events.filter(event => event[1] !== "sample"), steps = events.map(event => event[0]);
    traces.push(line(run, {steps, values: steps.map(step => at(step) || null)}, "", "", {mode: "markers",
      text: events.map(([, kind, text]) => wrapped(`${kind}: ${text}`)), hovertemplate: "%{text}<extra></extra>",
      marker: {symbol: "triangle-down", size: 14, color: "#D55E00", line: {width: 1.5, color: contrast()}}}));
  }
  return [traces, [["each step, and smoothed", "", "━"], ...sets.map((set, i) => [set, "", "●■★"[i % 3]]),
    ["incident: point at it for its text", "#D55E00", "▼"]], layout];
}

// Text for plotly, which takes some tags for its own.
const wrapped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").match(/[^]{1,60}\S*/g).join("<br>");

function times(run) {
  const all = [...new Set(points(run, "time wall").raw.steps)], every = Math.ceil(all.length / 150);
  const steps = all.filter((_, i) => (all.length - 1 - i) % every === 0);
  const parts = new Map(Object.keys(run.curves).filter(name => name.startsWith("time ")).map(name => {
    const at = between(points(run, name).raw);
    return [name.slice(5).replace("lost.", ""), steps.map((step, i) => at(step) - (i ? at(steps[i - 1]) : 0))];
  }));
  const wall = parts.get("wall") ?? [];
  parts.delete("wall");
  const known = [...parts.values()];
  parts.set("other", wall.map((seconds, i) => Math.max(0, seconds - sum(known.map(values => values[i])))));
  const whole = sum([...parts.values()].map(sum));
  const drawn = [...parts].filter(([, values]) => sum(values) / whole >= 5e-4);
  const look = {stackgroup: "all", groupnorm: "percent", line: {width: 0}, hovertemplate: "%{y:.1f} %"};
  return [drawn.map(([name, values], i) => line(run, {steps, values}, name, part(i), {...look, fillcolor: part(i)})),
    drawn.map(([name, values], i) => [`${name} ${(100 * sum(values) / whole).toFixed(1)} %`, part(i)]),
    {yaxis: {ticksuffix: " %", range: [0, 100], fixedrange: true}}];
}

function memory(run) {
  const ranks = (run.plan?.ranks ?? []).slice(0, 8), y = ranks.map(rank => `rank ${rank.rank} `);
  const names = [...new Set(ranks.flatMap(rank => Object.keys(rank.memory)))];
  const [size, unit] = ranks[0]?.total < 2 ** 30 ? [2 ** 20, "MiB"] : [2 ** 30, "GiB"];
  const bars = names.map((name, i) => ({type: "bar", orientation: "h", name, marker: {color: part(i)}, y,
    x: ranks.map(rank => (rank.memory[name] ?? 0) / size), hovertemplate: `%{x:.3~g} ${unit}`}));
  const most = ranks.map(rank => Math.max(...points(run, `rank ${rank.rank} gpu.memory_bytes`).raw.values));
  const marks = most.every(isFinite) ? [["measured, at most", most, contrast()],
    ["of the device", ranks.map(() => run.plan.device.bytes), "#D55E00"]] : [];
  return [[...bars, ...marks.map(([name, bytes, paint]) => ({y, x: bytes.map(one => one / size), name, mode: "markers",
    hovertemplate: `%{x:.4~g} ${unit}`, marker: {symbol: "line-ns", size: 18, line: {width: 4, color: paint}}}))],
  [...names.map((name, i) => [name, part(i)]), ...marks.map(([name, , paint]) => [name, paint, "┃"])],
  {barmode: "stack", bargap: 0.35, hovermode: "y unified", yaxis: {autorange: "reversed", fixedrange: true},
    xaxis: {title: {text: unit}, tickformat: "", rangemode: "tozero"}}];
}

// A cell is the worst value of its bucket.
function ranks(run, {select}) {
  const found = Object.keys(run.curves).filter(name => name.startsWith("rank ")).map(name => name.split(" "));
  fill(select, [...new Set(found.map(one => one[2]))].sort().map(name => [name, name.replaceAll("_", " ")]));
  const rows = found.filter(one => one[2] === select.value), curves = rows.map(name => run.curves[name.join(" ")]);
  const worst = WORST_IS_LOW.includes(select.value) ? Math.min : Math.max;
  const z = curves.map(curve => curve.map(([, , ...ends]) => worst(...ends.filter((_, i) => i % 2))));
  return [curves.slice(0, 1).map(curve => ({type: "heatmap", x: curve.map(bucket => bucket.at(-2)).map(toAxis(run)), z,
    y: rows.map(one => `rank ${one[1]} `), hovertemplate: "%{y}: %{z:.4~g}<extra></extra>", ygap: 1,
    colorscale: theme === "dark" ? "Viridis" : "YlGnBu", reversescale: theme !== "dark",
    colorbar: {thickness: 12, outlinewidth: 0, tickformat: "~s"}})), [],
  {hovermode: "closest", yaxis: {autorange: "reversed", fixedrange: true, dtick: rows.length > 16 ? null : 1}}];
}

// names: of numbers of each host, and what they are called; the second one is dotted.
const hosts = (names, format) => run => {
  const found = Object.keys(run.curves).map(name => name.split(" ")).filter(([kind]) => kind === "host");
  const all = [...new Set(found.map(one => one[1]))], paint = host => COLORS[theme][all.indexOf(host) % 7];
  const traces = all.flatMap(host => Object.entries(names).map(([name, label], i) => line(run,
    points(run, `host ${host} ${name}`).raw, `${host} ${label}`, paint(host), {line: {dash: i ? "dot" : "solid"}})));
  const keys = Object.values(names).filter(label => label).map((label, i) => [label, "", i ? "┅" : "━"]);
  keys.unshift(...all.map(host => [host, paint(host)]));
  return [traces, keys, {yaxis: {tickformat: format, rangemode: "tozero"}}];
};

const texts = (isWanted, kind) => run => [run.events.filter(isWanted).reverse().map(([step, what, text]) =>
  element("p", "", "", [element("b", `${what} at step ${step.toLocaleString("en")}`), element(kind, text)]))];

function element(kind, text = "", name = "", inner = []) {
  const made = Object.assign(document.createElement(kind), {textContent: text, className: name});
  made.append(...inner);
  return made;
}

const PANELS = [
  ["wide", "loss", "Loss, nats per token", losses],
  ["third", "norm", "Gradient norm", curve("grad_norm", ".4~g", {logs: true})],
  ["third", "lr", "Learning rate", curve("lr", ".3~e", {faint: false})],
  ["third", "rate", "Tokens per second", curve("tokens_per_s", ".4~s", {from: "tozero"})],
  ["half", "mfu", "MFU", curve("mfu", ".3~%", {from: "tozero"})],
  ["half", "goodput", "Goodput", curve("goodput", ".3~%", {faint: false, from: "tozero"})],
  ["half detail", "times", "Where time goes", times], ["half detail", "memory", "Memory of ranks", memory],
  ["wide detail low", "ranks", "Ranks", ranks], ["third detail", "cpu", "CPU load", hosts({cpu: ""}, "~%")],
  ["third detail", "network", "Network, bytes/s", hosts(NETWORK, "~s")],
  ["third detail", "disk", "Disk, bytes/s", hosts(DISK, "~s")],
  ["half detail texts", "incidents", "Incidents and warnings", texts(event => event[1] !== "sample", "span")],
  ["half detail texts", "samples", "Samples", texts(event => event[1] === "sample", "pre")],
].map(([kind, id, title, make]) => {
  const keys = element("div", "", "keys"), plot = element("div", "", "plot"), select = element("select");
  Object.assign(select, {hidden: id !== "ranks", ariaLabel: title, onchange: draw});
  plot.id = id;
  const article = element("article", "", kind, [element("h3", title), select, keys, plot]);
  byId(kind.includes("detail") ? "details" : "curves").append(article);
  return {make, select, keys, plot};
});

function drawPanel(panel) {
  const [drawn, keys = [], layout] = panel.make(runs.get(chosen), panel);
  if (panel.plot.parentNode.hidden = !(drawn.length && (window.Plotly || !layout))) return;
  panel.keys.replaceChildren(...keys.map(([label, paint, sign = "■"]) => {
    const mark = element("b", sign);
    mark.style.color = paint;
    return element("span", "", "", [mark, ` ${label}`]);
  }));
  if (!layout) return panel.plot.replaceChildren(...drawn);
  const css = getComputedStyle(document.body), of = name => css.getPropertyValue(name).trim();
  const both = {gridcolor: of("--line"), zerolinecolor: of("--line"), automargin: true};
  Plotly.react(panel.plot, drawn, {paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false,
    uirevision: axis, hovermode: "x unified", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hoverlabel: {bgcolor: of("--panel"), bordercolor: of("--line"), font: {color: of("--text")}},
    margin: {l: 46, r: 12, t: 12, b: 36}, font: {color: of("--faint"), size: 12, family: css.fontFamily}, ...layout,
    xaxis: {...both, title: {text: AXES[axis][0], standoff: 6}, tickformat: AXES[axis][1], ...layout.xaxis},
    yaxis: {...both, ...layout.yaxis}}, {displayModeBar: false, responsive: true});
}

function makeCard(run) {
  const name = element("button", run.name, "name");
  Object.assign(name, {title: "show or hide its curves", onclick: () => { run.hidden = !run.hidden; draw(); }});
  const top = element("div", "", "top", [name, element("span")]);
  const card = element("section", "", "", [top, element("div"), element("dl")]);
  byId("cards").append(card);
  return card;
}

function drawCards() {
  for (const run of runs.values()) {
    const card = run.card ??= makeCard(run), [{children: [name, state]}, bar, list] = card.children;
    name.ariaPressed = String(!run.hidden);
    card.className = run.hidden ? "off" : "";
    card.style.setProperty("--run", color(run));
    bar.style.setProperty("--share", `${100 * run.share}%`);
    Object.assign(state, {textContent: run.text, className: run.state});
    list.replaceChildren(...run.figures.map(([label, value, note]) =>
      element("div", "", "", [element("dt", label), element("dd", value, "value"), element("dd", note)])));
  }
}

function fill(select, options) {
  if (JSON.stringify(options.map(([value]) => value)) === JSON.stringify([...select.options].map(option => option.value))) return;
  const before = select.value;
  select.replaceChildren(...options.map(([value, label]) => new Option(label, value, false, value === before)));
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
    byId("connection").textContent = answer.more ? "reading ..." : "";
    document.title = [...runs.values()].map(run => `${Math.floor(100 * run.share)} % ${run.name}`).at(-1) ?? "gpt.cu";
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

for (const value of Object.keys(AXES)) {
  const button = element("button", value === "cost" ? "dollars" : value);
  byId("axes").append(Object.assign(button, {value, onclick: () => { axis = value; draw(); }}));
}
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.onchange = () => setTheme(dark.matches);
byId("theme").onclick = () => setTheme(theme === "light");
byId("smoothing").oninput = draw;
byId("log").onclick = () => { log = !log; draw(); };
byId("chosen").onchange = () => { chosen = byId("chosen").value; draw(); };
setTheme(dark.matches);
poll();
