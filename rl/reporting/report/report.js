// Hover, zoom, smoothing and log scale of the charts, and the filter of the samples. The page is complete without it.
"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg", W = 2000, H = 1000;
  const D = JSON.parse(document.getElementById("data").textContent);
  const plots = [...document.querySelectorAll("svg.plot[data-c]")];
  const view = { from: null, to: null, smooth: 0, scale: "auto" };
  const byId = id => document.getElementById(id);
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function make(name, attributes, text) {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function number(v) {
    const size = Math.abs(v);
    if (!Number.isFinite(v)) return "-";
    if (size === 0) return "0";
    if (size >= 1e15 || size < 5e-4) return v.toPrecision(2);
    for (const [factor, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) if (size >= factor) return +(v / factor).toPrecision(3) + unit;
    return size >= 1000 ? Math.round(v).toLocaleString("en-US") : String(+v.toPrecision(size < 1 ? 3 : 4));
  }
  function nice(width, count) {
    const power = 10 ** Math.floor(Math.log10(width / count));
    return power * ([1, 2, 5].find(f => f * power >= width / count * (1 - 1e-9)) || 10);
  }
  function stageAt(x) {
    return D.stages.filter(s => s.start <= x).pop() || D.stages[0];
  }

  // Values of a line inside the domain, smoothed if asked: x, y, low and high for its bands, and where it is interrupted.
  function part(line, from, to) {
    const xs = D.xs[line.x], gaps = new Set(line.g), out = [];
    let mean = null;
    xs.forEach((x, i) => {
      if (gaps.has(i)) mean = null;
      mean = mean === null ? line.y[i] : view.smooth * mean + (1 - view.smooth) * line.y[i];
      if (x >= from && x <= to) out.push({ x, i, y: mean, gap: gaps.has(i) });
    });
    return out;
  }
  function domain(chart) {
    if (view.from === null || view.to <= chart.f || view.from >= chart.l) return [chart.f, chart.l];
    return [Math.max(view.from, chart.f), Math.min(view.to, chart.l)];
  }
  function scaleOf(chart, parts) {
    let low = Infinity, high = -Infinity;
    const see = v => { if (v !== undefined) { low = Math.min(low, v); high = Math.max(high, v); } };
    if (chart.stack) {
      low = 0;
      const sums = new Map();
      chart.s.forEach((s, n) => { if (!s.r) parts[n].forEach(p => sums.set(p.x, (sums.get(p.x) || 0) + p.y)); });
      const sorted = [...sums.values()].sort((a, b) => a - b);
      const bound = 1.5 * sorted[Math.floor(0.98 * (sorted.length - 1))];
      high = Math.max(...sorted);
      high = high > 2 * bound && bound > 0 && sorted.length > 20 ? bound : high * 1.04;
      return { low, high: high || 1, log: false };
    }
    chart.s.forEach((s, n) => parts[n].forEach(p => {
      for (const key of ["lo", "hi", "bl", "bh"]) if (s[key] && !view.smooth) see(s[key][p.i]);
      see(p.y);
    }));
    chart.lim.forEach(see);
    if (low > high) return { low: 0, high: 1, log: false };
    const log = low > 0 && (view.scale === "log" || (view.scale === "auto" && (chart.log || high / low >= 1000)));
    if (log) return { low: low / 1.15, high: high * 1.15, log };
    if (view.from === null && chart.share && low >= 0 && high <= 1) return { low: 0, high: high > 0.5 ? 1 : Math.max(high * 1.1, 1e-9), log };
    if (view.from === null && low >= 0 && low < 0.5 * high) low = 0;
    const space = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    return { low: low ? low - space : 0, high: high || !low ? high + space : 0, log };
  }
  function place(scale, v) {
    const f = scale.log ? x => Math.log10(Math.max(x, scale.low)) : x => x;
    const share = (f(scale.high) - f(v)) / (f(scale.high) - f(scale.low));
    return Math.round(Math.min(2, Math.max(-1, share)) * H);
  }
  function drawGrid(svg, chart, scale) {
    const group = svg.querySelector(".grid"), marks = [];
    if (scale.log) {
      const first = Math.ceil(Math.log10(scale.low)), last = Math.floor(Math.log10(scale.high));
      for (let p = first; p <= last; p += Math.max(1, Math.ceil((last - first + 1) / 5))) marks.push(10 ** p);
    } else {
      const step = nice(scale.high - scale.low, chart.small ? 2 : 4);
      for (let n = Math.ceil(scale.low / step - 1e-9); n * step <= scale.high + 1e-9 * step; n++) marks.push(n * step);
    }
    group.replaceChildren(...marks.flatMap(v => {
      const y = place(scale, v) / 10 + "%";
      return [make("line", { x1: 0, x2: "100%", y1: y, y2: y }), make("text", { x: -7, y, dy: ".32em" }, number(v))];
    }));
  }
  function drawSteps(svg, chart, from, to) {
    const nodes = [], step = Math.max(1, Math.round(nice(to - from, chart.small ? 3 : 6)));
    const stages = D.stages.filter(s => s.start + s.last - s.first > from && s.start < to);
    const at = x => (x - from) / (to - from) * 100;
    for (const s of stages) {
      const end = at(s.start + s.last - s.first);
      for (let n = Math.ceil(s.first / step) * step; n <= s.last; n += step) {
        const x = at(s.start + n - s.first);
        if (x > -0.01 && x < 100.01 && (s === stages[stages.length - 1] || end - x >= 6))
          nodes.push(make("text", { x: x + "%", y: "100%", dy: 16 }, n.toLocaleString("en-US")));
      }
      const x = Math.max(0, at(s.start)) + "%";
      if (s.start > from) nodes.push(make("line", { class: "stage", x1: x, x2: x, y1: 0, y2: "100%" }));
      if (stages.length > 1 && !chart.small) nodes.push(make("text", { class: "stage", x, dx: 4, y: 0, dy: 11 }, s.n));
    }
    for (const x of D.restarts.filter(r => r > from && r < to))
      nodes.push(make("line", { class: "restart", x1: at(x) + "%", x2: at(x) + "%", y1: 0, y2: "100%" }));
    svg.querySelector(".steps").replaceChildren(...nodes);
  }
  function drawInk(svg, chart, parts, scale, from, to) {
    const nodes = [], px = x => Math.round((x - from) / (to - from) * W), py = v => place(scale, v);
    const path = points => points.map(([p, v], n) => (n && !p.gap ? "L" : "M") + px(p.x) + " " + py(v)).join("");
    const add = (kind, d) => nodes.push(make("path", { class: kind, d }));
    function band(kind, points, low, high) {
      const runs = points.reduce((all, p, n) => (p.gap || !n ? all.push([p]) : all[all.length - 1].push(p), all), []);
      add(kind, runs.map(run => "M" + [...run.map(p => px(p.x) + " " + py(high(p))), ...run.reverse().map(p => px(p.x) + " " + py(low(p)))].join("L") + "z").join(""));
    }
    if (chart.stack) {
      const sums = new Map();
      chart.s.forEach((s, n) => {
        if (s.r || !parts[n].length) return;
        const below = new Map(sums);
        parts[n].forEach(p => sums.set(p.x, (sums.get(p.x) || 0) + p.y));
        band("a a" + s.t, parts[n], p => below.get(p.x) || 0, p => sums.get(p.x));
      });
      add("over", [...sums].filter(([, v]) => v > scale.high).map(([x]) => `M${px(x)} 0v60`).join(""));
    } else {
      chart.s.forEach((s, n) => {
        if (!parts[n].length || s.r || view.smooth) return;
        if (s.bl) band(`b b${s.t} wide`, parts[n], p => s.bl[p.i], p => s.bh[p.i]);
        if (s.lo) band("b b" + s.t, parts[n], p => s.lo[p.i], p => s.hi[p.i]);
      });
    }
    [...chart.s].map((s, n) => [s, n]).reverse().forEach(([s, n]) => {
      if (chart.stack && !s.r) return;
      if (view.smooth && !s.r) add(`l l${s.t} faint`, path(parts[n].map(p => [p, s.y[p.i]])));
      add(s.r ? "l ref" : "l l" + s.t, path(parts[n].map(p => [p, p.y])));
      if (s.d) add("d l" + s.t, parts[n].map(p => `M${px(p.x)} ${py(p.y)}h0`).join(""));
      if (s.lost) add("lost", s.lost.filter(x => x >= from && x <= to).map(x => `M${px(x)} ${H}v-40`).join(""));
    });
    chart.lim.forEach(v => add("limit", `M0 ${py(v)}h${W}`));
    svg.querySelector(".ink").replaceChildren(...nodes);
  }
  function draw(svg) {
    const chart = D.charts[svg.dataset.c], [from, to] = domain(chart);
    const parts = chart.s.map(s => part(s, from, to)), scale = scaleOf(chart, parts);
    drawGrid(svg, chart, scale);
    drawSteps(svg, chart, from, to);
    drawInk(svg, chart, parts, scale, from, to);
  }
  const visible = svg => svg.getClientRects().length > 0;
  let changed = false;
  function drawAll() {
    changed = true;
    plots.filter(visible).forEach(draw);
    byId("reset").hidden = view.from === null;
  }
  document.querySelectorAll("details").forEach(d => d.addEventListener("toggle", () => {
    if (changed && d.open) plots.filter(svg => d.contains(svg)).forEach(draw);
  }));

  function xAt(svg, event) {
    const box = svg.getBoundingClientRect(), [from, to] = domain(D.charts[svg.dataset.c]);
    return from + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (to - from);
  }
  function hover(svg, event) {
    const chart = D.charts[svg.dataset.c], at = xAt(svg, event), rows = [];
    let shown = null;
    for (const s of chart.s) {
      const xs = D.xs[s.x];
      if (!xs.length) continue;
      const i = xs.reduce((best, x, n) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? n : best), 0);
      if (shown === null) shown = xs[i];
      if (Math.abs(xs[i] - shown) > (chart.l - chart.f) / 20) continue;
      const range = s.lo && s.hi[i] > s.lo[i] ? ` (${number(s.lo[i])} to ${number(s.hi[i])})` : s.bl ? ` (${number(s.bl[i])} to ${number(s.bh[i])})` : "";
      rows.push([s, number(s.y[i]) + range, s.c]);
    }
    clear();
    if (shown === null) return;
    const stage = stageAt(shown), head = document.createElement("div");
    const buckets = Math.max(0, ...rows.map(r => r[2] || 0));
    head.className = "at";
    head.textContent = `${stage.n}, step ${Math.round(shown - stage.start + stage.first).toLocaleString("en-US")}` + (buckets > 1 ? `, mean of ${buckets} steps` : "");
    tip.replaceChildren(head, ...rows.map(([s, value]) => {
      const row = document.createElement("div"), dot = document.createElement("span");
      dot.className = s.r ? "dot dash" : "dot t" + s.t;
      row.append(dot, `${s.n} `, Object.assign(document.createElement("b"), { textContent: value }));
      return row;
    }));
    tip.hidden = false;
    tip.style.left = Math.max(4, Math.min(event.pageX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = event.pageY + 16 + "px";
    for (const other of plots.filter(visible)) {
      const [from, to] = domain(D.charts[other.dataset.c]), x = (shown - from) / (to - from) * 100;
      if (x >= 0 && x <= 100) other.append(make("line", { class: "cursor", x1: x + "%", x2: x + "%", y1: 0, y2: "100%" }));
    }
  }
  function clear() {
    tip.hidden = true;
    document.querySelectorAll(".cursor").forEach(node => node.remove());
  }
  for (const svg of plots) {
    let start = null, box = null;
    svg.addEventListener("pointerdown", e => { if (e.pointerType === "mouse" && !e.button) { start = xAt(svg, e); box = null; svg.setPointerCapture(e.pointerId); } });
    svg.addEventListener("pointermove", e => {
      if (start !== null) {
        if (!box) svg.append(box = make("rect", { class: "pick", y: 0, height: "100%" }));
        const [from, to] = domain(D.charts[svg.dataset.c]), ends = [start, xAt(svg, e)].sort((a, b) => a - b).map(x => (x - from) / (to - from) * 100);
        box.setAttribute("x", ends[0] + "%");
        box.setAttribute("width", ends[1] - ends[0] + "%");
      }
      hover(svg, e);
    });
    svg.addEventListener("pointerup", e => {
      const ends = start === null ? [] : [start, xAt(svg, e)].sort((a, b) => a - b), chart = D.charts[svg.dataset.c];
      if (box) box.remove();
      if (box && ends[1] - ends[0] > (chart.l - chart.f) / 100) { [view.from, view.to] = ends; drawAll(); }
      start = null;
    });
    svg.addEventListener("pointerleave", () => { if (start === null) clear(); });
    svg.addEventListener("dblclick", reset);
  }
  function reset() { view.from = view.to = null; drawAll(); }
  document.querySelectorAll(".tools").forEach(node => { node.hidden = false; });
  byId("reset").addEventListener("click", reset);
  byId("smooth").addEventListener("input", e => { view.smooth = Math.min(0.98, +e.target.value); drawAll(); });
  byId("scale").addEventListener("change", e => { view.scale = e.target.value; drawAll(); });

  const samples = [...document.querySelectorAll(".sample")], kinds = [...document.querySelectorAll("[data-kind]")];
  const words = byId("words");
  function filter() {
    const kind = (kinds.find(b => b.getAttribute("aria-pressed") === "true") || { dataset: { kind: "" } }).dataset.kind;
    const text = words ? words.value.toLowerCase() : "";
    for (const s of samples) s.hidden = !((!kind || s.dataset.why.split("|").includes(kind)) && (!text || s.textContent.toLowerCase().includes(text)));
  }
  for (const button of kinds) button.addEventListener("click", () => {
    kinds.forEach(b => b.setAttribute("aria-pressed", String(b === button)));
    filter();
  });
  if (words) words.addEventListener("input", filter);
})();
