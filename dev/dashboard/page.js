// The page of dev/dashboard.py: asks for what is new every two seconds, and draws it. What a bucket, a column and an event
// are, runs.py says. Texts of runs become textContent only.
"use strict";

// The colours of Okabe and Ito; on white without the yellow, on black without the dark blue.
const COLORS = {light: ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000"],
                dark: ["#56B4E9", "#E69F00", "#00B886", "#CC79A7", "#F0E442", "#D55E00", "#FFFFFF"]};
const AXES = {steps: ["step", null], tokens: ["tokens", "tokens"], hours: ["hours", "hours"], dollars: ["dollars", "cost"]};
const TIMES = {compute: "#0072B2", steps: "#0072B2", "exposed.data": "#E69F00", "exposed.tp": "#D55E00", "exposed.cp": "#F0E442",
               "exposed.pp": "#B07AA1", bubble: "#CC79A7", data: "#8C564B", "lost.evaluation": "#56B4E9", "lost.checkpoints": "#009E73",
               "lost.samples": "#76D7C4", "lost.setup": "#9AA5B1", "lost.rollbacks": "#A93226", "lost.restarts": "#6C3483", other: "#5D6671"};
const RANKS = {comm_exposed_ms: "waiting for communication, ms", comm_ms: "in collectives, ms", step_ms: "step, ms",
               "gpu.utilisation": "GPU utilisation", "gpu.temperature_c": "temperature, °C", "gpu.power_w": "power, W",
               "gpu.sm_mhz": "SM clock, MHz", "gpu.throttled": "reasons for throttling", "gpu.memory_bytes": "memory, bytes"};
const INCIDENTS = {rollback: "x", incident: "triangle-down", warning: "diamond", "left out": "circle-open"};
const GIB = 2 ** 30, byId = id => document.getElementById(id), runs = new Map();
let axis = "steps", since = "", theme = "light", log = false, chosen = null;

// ---- what a run is, and its points
const isShown = run => !run.hidden;
const color = run => COLORS[theme][[...runs.values()].indexOf(run) % COLORS.light.length];
const extend = (list, [first, added]) => { list.length = first; for (const one of added) list.push(one); };

function take(news) {
  let run = runs.get(news.name);
  if (!run || news.cleared) {
    run = {hidden: run?.hidden, name: news.name, curves: {}, ranks: {}, times: [], events: [], samples: [], plan: run?.plan};
    runs.set(news.name, run);
  }
  for (const group of ["curves", "ranks"])
    for (const [name, part] of Object.entries(news[group])) extend(run[group][name] ??= [], part);
  extend(run.times, news.times);
  for (const [list, most] of [["events", 500], ["samples", 50]]) run[list] = [...run[list], ...news[list]].slice(-most);
  run.plan = news.plan ?? run.plan;
  return Object.assign(run, {state: news.state, text: news.text, share: news.share, figures: news.figures});
}

// All points of a curve, and the mean of each bucket, as steps and values; of a value that was not finite, null.
function points(run, name) {
  const raw = {steps: [], values: []}, means = {steps: [], values: [], counts: []};
  const add = (to, step, value) => { to.steps.push(step); to.values.push(value); };
  for (const [count, first, ...ends] of run.curves[name] ?? []) {
    if (count < 2) {
      for (const to of [raw, means]) add(to, count ? first : to.steps.at(-1), count ? ends[0] : null);
    } else {
      const [lowStep, low, highStep, high] = ends;
      if (lowStep < highStep) add(raw, lowStep, low);
      add(raw, highStep, high);
      if (lowStep > highStep) add(raw, lowStep, low);
      add(means, (lowStep + highStep) / 2, first);
    }
    means.counts.push(count);
  }
  return {raw, means};
}

// A function from steps to the chosen axis: between the points of a curve that rises, tokens or hours or cost.
function toAxis(run) {
  const [, name] = AXES[axis];
  if (!name) return step => step;
  const {steps, values} = points(run, name).raw;
  return step => {
    let low = 0, high = steps.length - 1;
    if (high < 0) return null;
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
    const share = high > low ? Math.min(1, Math.max(0, (step - steps[low]) / (steps[high] - steps[low]))) : 0;
    return values[low] + share * (values[high] - values[low]);
  };
}

// The mean of each value and its neighbours, a share of all in width; gaps are left out of it.
function smooth({values, counts}) {
  const reach = Math.round(values.length * byId("smoothing").value / 200), sums = [0], weights = [0];
  values.forEach((value, i) => { sums.push(sums[i] + (value ?? 0) * counts[i]); weights.push(weights[i] + (value === null ? 0 : counts[i])); });
  return values.map((value, i) => {
    const begin = Math.max(0, i - reach), end = Math.min(values.length, i + reach + 1);
    return value === null ? null : (sums[end] - sums[begin]) / (weights[end] - weights[begin]);
  });
}

// ---- panels: each returns traces, what is special in its layout, and the keys above it; no traces: nothing is known
const line = (run, x, y, name, more = {}) => ({x, y, name, type: "scatter", mode: "lines", connectgaps: false, ...more,
  line: {color: color(run), width: 2, ...more.line}});

// names: of curves; the first one is drawn as a line, a second one dotted; faint: every point, below the smoothed line
function curves(names, format, {faint = true, isLog = false, labels = []} = {}) {
  return () => {
    const traces = [];
    for (const run of [...runs.values()].filter(isShown)) names.forEach((name, i) => {
      if (!run.curves[name]) return;
      const {raw, means} = points(run, name), x = toAxis(run), label = labels[i] ? `${run.name}, ${labels[i]}` : run.name;
      const line_ = {dash: i ? "dot" : "solid"};
      if (faint) traces.push(line(run, raw.steps.map(x), raw.values, label, {opacity: 0.28, hoverinfo: "skip", meta: name, line: {width: 1}}));
      traces.push(line(run, means.steps.map(x), faint ? smooth(means) : means.values, label, {line: line_, meta: name}));
    });
    const keys = labels.map((label, i) => [label, "var(--faint)", i ? "dash" : "line"]);
    return {traces, keys, layout: {yaxis: {hoverformat: format, tickformat: format.replace(".4f", "").replace(",.0f", "~s"),
      type: isLog && log ? "log" : "linear", rangemode: format === ".1%" || format === ",.0f" ? "tozero" : "normal"}}};
  };
}

function losses() {
  const {traces, layout} = curves(["loss"], ".4f", {isLog: true})();
  const keys = [["training: each step faint, smoothed strong", "var(--faint)", "line"]], symbols = ["circle", "diamond", "square", "star"];
  const sets = new Set();
  for (const run of [...runs.values()].filter(isShown)) {
    const x = toAxis(run), {means} = points(run, "loss"), strong = smooth(means);
    for (const name of Object.keys(run.curves).filter(key => key.startsWith("val_loss"))) {
      const {raw} = points(run, name), set = name.slice(9) || "validation", number = [...sets.add(set)].indexOf(set);
      traces.push(line(run, raw.steps.map(x), raw.values, `${run.name}, ${set}`, {mode: "lines+markers", meta: name, line: {width: 1, dash: "dot"},
        marker: {symbol: symbols[number % 4], size: 8, color: color(run), line: {color: "var(--panel)", width: 1}}}));
    }
    const y = step => strong[Math.max(0, means.steps.findIndex(one => one >= step))] ?? strong.at(-1);
    for (const [kind, symbol] of Object.entries(INCIDENTS)) {
      const events = run.events.filter(event => event[1] === kind);
      if (events.length) traces.push({x: events.map(e => x(e[0])), y: events.map(e => y(e[0])), text: events.map(e => wrapped(`${kind}: ${e[2]}`)),
        mode: "markers", type: "scatter", name: run.name, hovertemplate: "%{text}<extra></extra>", marker: {symbol, size: 13, color: "#D55E00",
          line: {color: theme === "dark" ? "#fff" : "#000", width: 1}}});
    }
  }
  keys.push(...[...sets].map(set => [set, "var(--faint)", "dot"]));
  if ([...runs.values()].some(run => run.events.length)) keys.push(["incident (hover for its text)", "#D55E00", "dot"]);
  return {traces, keys, layout};
}

// Text for plotly, which would take some tags for its own.
function wrapped(text) {
  const lines = text.match(/.{1,70}(\s|$)|.{1,70}/g) ?? [];
  return lines.map(one => one.replace(/&/g, "&amp;").replace(/</g, "&lt;")).join("<br>");
}

function times(run) {
  const x = toAxis(run), names = new Set(Object.keys(TIMES)), sums = {};
  const columns = run.times.map(([step, cells]) => {
    const parts = {...cells}, known = Object.entries(cells).reduce((sum, [name, value]) => sum + (name === "wall" ? 0 : value), 0);
    delete parts.wall;
    parts.other = Math.max(0, (cells.wall ?? 0) - known);
    for (const [name, value] of Object.entries(parts)) { names.add(name); sums[name] = (sums[name] ?? 0) + value; }
    return [x(step), parts];
  });
  const whole = Object.values(sums).reduce((sum, value) => sum + value, 0);
  const drawn = [...names].filter(name => sums[name] / whole >= 0.0005);
  const label = name => name === "data" ? "waiting for data" : name.replace("lost.", "").replace("exposed.", "exposed: ").replace("setup", "set-up");
  const paint = name => TIMES[name] ?? COLORS.light[drawn.indexOf(name) % 6];
  const traces = drawn.map(name => ({x: columns.map(c => c[0]), y: columns.map(c => c[1][name] ?? 0), name: label(name), type: "scatter", mode: "lines",
    stackgroup: "all", groupnorm: "percent", line: {width: 0}, fillcolor: paint(name), hovertemplate: "%{y:.1f} %"}));
  return {traces, keys: drawn.map(name => [`${label(name)} ${(100 * sums[name] / whole).toFixed(1)} %`, paint(name)]),
    layout: {yaxis: {ticksuffix: " %", range: [0, 100], fixedrange: true}}};
}

function memory(run) {
  const ranks = (run.plan?.ranks ?? []).filter(rank => rank?.memory).slice(0, 8), measured = run.ranks["gpu.memory_bytes"] ?? [];
  const names = [...new Set(ranks.flatMap(rank => Object.keys(rank.memory)))], y = ranks.map(rank => `rank ${rank.rank} `);
  const paint = i => [...COLORS.light.slice(0, 6), "#8C564B", "#9AA5B1", "#76D7C4", "#6C3483"][i % 10];
  const traces = names.map((name, i) => ({y, x: ranks.map(rank => (rank.memory[name] ?? 0) / GIB), name, type: "bar", orientation: "h",
    marker: {color: paint(i)}, hovertemplate: "%{x:.3~g} GiB"}));
  const most = ranks.map(rank => Math.max(...measured.map(([, cells]) => cells[rank.rank] ?? 0)) / GIB);
  if (measured.length) traces.push({y, x: most, name: "measured, at most", type: "scatter", mode: "markers", hovertemplate: "%{x:.4~g} GiB",
    marker: {symbol: "line-ns", size: 20, line: {width: 4, color: theme === "dark" ? "#fff" : "#000"}}});
  const room = measured.length && run.plan?.device?.bytes / GIB;
  return {traces, keys: [...names.map((name, i) => [name, paint(i)]), ...measured.length ? [["measured, at most", "var(--text)", "line"]] : []],
    layout: {barmode: "stack", bargap: 0.35, hovermode: "y unified", yaxis: {autorange: "reversed", fixedrange: true},
      shapes: room ? [{type: "line", x0: room, x1: room, y0: 0, y1: 1, yref: "paper", line: {dash: "dot", width: 2, color: "#D55E00"}}] : [],
      xaxis: {title: {text: room ? "GiB; dotted: all that the device has" : "GiB"}, rangemode: "tozero"}}};
}

function ranks(run, panel) {
  const select = panel.select, names = Object.keys(run.ranks), label = name => RANKS[name] ?? name.replace("gpu.", "").replaceAll("_", " ");
  const known = [...Object.keys(RANKS).filter(name => run.ranks[name]), ...names.filter(name => !RANKS[name]).sort()];
  fill(select, known.map(name => [name, label(name)]));
  select.hidden = !known.length;
  const grid = run.ranks[select.value] ?? [], x = toAxis(run);
  const rows = [...new Set(grid.flatMap(([, cells]) => Object.keys(cells)))].sort((a, b) => a - b);
  const traces = rows.length ? [{type: "heatmap", x: grid.map(c => x(c[0])), y: rows.map(rank => `rank ${rank} `),
    z: rows.map(rank => grid.map(c => c[1][rank] ?? null)), colorscale: theme === "dark" ? "Viridis" : "YlGnBu", reversescale: theme !== "dark",
    hovertemplate: "%{y}: %{z:.4~g}<extra></extra>", colorbar: {thickness: 12, outlinewidth: 0, tickformat: "~s"}, ygap: 1}] : [];
  return {traces, layout: {hovermode: "closest", yaxis: {autorange: "reversed", fixedrange: true, showgrid: false, dtick: rows.length > 16 ? null : 1}}};
}

// names: of numbers of a host; a second one is dotted
function hosts(names, format, labels = []) {
  return run => {
    const hosts = [...new Set(Object.keys(run.curves).filter(key => key.startsWith("host ")).map(key => key.split(" ")[1]))], traces = [];
    hosts.forEach((host, i) => names.forEach((name, j) => {
      const {raw} = points(run, `host ${host} ${name}`);
      if (raw.steps.length) traces.push(line(run, raw.steps.map(toAxis(run)), raw.values, `${host}${labels[j] ? ", " + labels[j] : ""}`,
        {line: {width: 1.5, color: COLORS[theme][i % 7], dash: j ? "dot" : "solid"}}));
    }));
    return {traces, keys: [...hosts.map((host, i) => [host, COLORS[theme][i % 7], "line"]), ...labels.map((label, j) => [label, "var(--faint)", j ? "dash" : "line"])],
      layout: {yaxis: {tickformat: format, hoverformat: format.replace("~", ".3"), rangemode: "tozero"}}};
  };
}

function element(kind, text, name = "") {
  const made = document.createElement(kind);
  made.textContent = text;
  made.className = name;
  return made;
}

const incidents = run => ({texts: run.events.slice(-100).reverse().map(([step, kind, text]) => {
  const row = element("p", "");
  row.append(element("i", step.toLocaleString("en")), element("b", kind), element("span", text));
  return row;
})});
const samples = run => ({texts: run.samples.slice(-20).reverse().flatMap(([step, , text]) =>
  [element("small", `step ${step.toLocaleString("en")}`), element("pre", text)])});

const PANELS = [
  ["curves", "loss", "Loss, nats per token", losses, "wide"],
  ["curves", "norm", "Gradient norm", curves(["grad_norm"], ".3~g", {isLog: true}), "third"],
  ["curves", "lr", "Learning rate", curves(["lr"], ".2~e", {faint: false}), "third"],
  ["curves", "rate", "Tokens per second", curves(["tokens_per_s"], ",.0f"), "third"],
  ["curves", "mfu", "MFU", curves(["mfu"], ".1%")],
  ["curves", "goodput", "Goodput: steps' share of all hours", curves(["goodput"], ".1%", {faint: false})],
  ["details", "times", "Where time goes", times], ["details", "memory", "Memory: planned and measured", memory],
  ["details", "ranks", "Ranks", ranks, "wide", "low"],
  ["details", "cpu", "CPU load of hosts", hosts(["cpu"], "~%"), "third"],
  ["details", "network", "Network, bytes/s", hosts(["network_bytes_per_s.in", "network_bytes_per_s.out"], "~s", ["in", "out"]), "third"],
  ["details", "disk", "Disk, bytes/s", hosts(["disk_bytes_per_s.read", "disk_bytes_per_s.write"], "~s", ["read", "written"]), "third"],
  ["details", "incidents", "Incidents and warnings", incidents, "", "texts"], ["details", "samples", "Samples, newest first", samples, "", "texts"],
].map(([where, id, title, make, width = "", height = ""]) => {
  const article = byId("panel").content.cloneNode(true).firstElementChild, [h3, select, keys, plot] = article.children;
  article.className = width;
  h3.textContent = title;
  plot.classList.add(...height ? [height] : []);
  plot.id = id;
  select.setAttribute("aria-label", title);
  select.onchange = draw;
  byId(where).append(article);
  return {where, make, article, select, keys, plot};
});

function drawPanel(panel) {
  const run = runs.get(chosen), {traces = [], layout = {}, keys = [], texts} = panel.make(run, panel);
  panel.article.hidden = !(texts ?? traces).length || (!texts && !window.Plotly);
  if (panel.article.hidden) return;
  panel.keys.replaceChildren(...keys.map(([label, paint, kind = ""]) => {
    const key = element("span", label, kind);
    key.style.setProperty("--key", paint);
    return key;
  }));
  if (texts) return panel.plot.replaceChildren(...texts);
  const css = getComputedStyle(document.documentElement), of = name => css.getPropertyValue(name).trim();
  const both = {gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--line"), automargin: true, exponentformat: "SI"};
  Plotly.react(panel.plot, traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "x unified", uirevision: axis,
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", margin: {l: 46, r: 12, t: 12, b: 36},
    font: {color: of("--faint"), size: 12, family: css.fontFamily}, hoverlabel: {bgcolor: of("--panel"), bordercolor: of("--line"), font: {color: of("--text")}},
    ...layout, xaxis: {...both, title: {text: AXES[axis][0], standoff: 6}, tickformat: axis === "steps" ? "," : axis === "tokens" ? "~s" : "", ...layout.xaxis},
    yaxis: {...both, ...layout.yaxis}}, {displayModeBar: false, responsive: true});
}

function drawCards() {
  byId("cards").replaceChildren(...[...runs.values()].map(run => {
    const card = element("div", "", run.hidden ? "card off" : "card"), top = element("div", "", "top"), list = element("dl", "");
    const name = element("button", run.name, "name"), bar = element("progress", "");
    name.setAttribute("aria-pressed", String(!run.hidden));
    name.title = "show or hide its curves";
    name.onclick = () => { run.hidden = !run.hidden; draw(); };
    top.append(name, element("span", run.text, `state ${run.state}`));
    for (const [label, value, note] of run.figures) {
      const figure = element("div", "");
      figure.append(element("dt", label), element("dd", value, "value"), element("dd", note, "note"));
      list.append(figure);
    }
    bar.value = run.share ?? 0;
    card.style.setProperty("--run", color(run));
    card.append(top, bar, list);
    return card;
  }));
}

function fill(select, options) {
  if (select.textContent === options.map(([, label]) => label).join("")) return;
  const before = select.value;
  select.replaceChildren(...options.map(([value, label]) => Object.assign(element("option", label), {value})));
  if (options.some(([value]) => value === before)) select.value = before;
}

function draw() {
  drawCards();
  if (!runs.size) return;
  if (!runs.has(chosen)) chosen = [...runs.keys()].at(-1);
  fill(byId("chosen"), [...runs.keys()].map(name => [name, name]));
  byId("chosen").value = chosen;
  byId("detail").hidden = runs.size < 2;
  for (const button of byId("axes").children) {
    const curve = AXES[button.textContent][1];
    button.hidden = curve && ![...runs.values()].some(run => run.curves[curve]);
    button.setAttribute("aria-pressed", String(button.textContent === axis));
  }
  PANELS.forEach(drawPanel);
}

// ---- the loop
async function poll() {
  let wait = document.hidden ? 15000 : 2000;
  try {
    const answer = await (await fetch(`data?${since}`)).json();
    if (answer.fresh) runs.clear();
    since = answer.since;
    const shown = [...runs.values()].filter(run => run.hidden).map(run => run.name);
    answer.runs.forEach(take);
    const parts = run => [run.curves, run.ranks].some(group => Object.keys(group).length) || run.events.length || run.samples.length || run.plan || run.cleared;
    answer.runs.some(parts) || shown.length !== shown.length ? draw() : drawCards();
    const run = runs.get(chosen);
    document.title = run ? `${run.share === null ? "" : Math.floor(100 * run.share) + " % · "}${run.name}` : "gpt.cu";
    byId("connection").textContent = answer.more ? "reading ..." : "";
    if (answer.more) wait = 0;
  } catch (error) {
    byId("connection").textContent = `no answer from dashboard.py (${error.message})`;
  }
  setTimeout(poll, wait);
}

function setTheme(name) {
  document.documentElement.dataset.theme = theme = name;
  draw();
}

for (const name of Object.keys(AXES)) {
  const button = element("button", name);
  button.onclick = () => { axis = name; draw(); };
  byId("axes").append(button);
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
prefersDark.onchange = () => setTheme(prefersDark.matches ? "dark" : "light");
byId("theme").onclick = () => setTheme(theme === "dark" ? "light" : "dark");
byId("smoothing").oninput = draw;
byId("log").onclick = () => { log = !log; byId("log").setAttribute("aria-pressed", String(log)); draw(); };
byId("chosen").onchange = () => { chosen = byId("chosen").value; draw(); };
setTheme(prefersDark.matches ? "dark" : "light");
poll();
