// Hover, zoom, smoothing and scale of the charts, and the filter of the samples. The page is complete without it.
"use strict";
(() => {
  const D = JSON.parse(document.getElementById("data").textContent), W = 2000, H = 1000;
  const byId = id => document.getElementById(id), all = query => [...document.querySelectorAll(query)];
  const plots = all("svg.plot[data-c]"), chartOf = svg => D.charts[svg.dataset.c];
  const view = { from: null, to: null, smooth: 0, scale: "auto", changed: false };
  const element = (name, values) => Object.assign(document.createElement(name), values);
  const tip = document.body.appendChild(element("div", { id: "tip", hidden: true }));
  function make(name, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
    return Object.assign(node, text === undefined ? {} : { textContent: text });
  }
  function number(v) {
    const size = Math.abs(v), unit = [[1e12, "T"], [1e9, "G"], [1e6, "M"]].find(each => size >= each[0]);
    if (!size || size >= 1e15 || size < 5e-4) return size >= 1e-4 && size < 1 ? String(+v.toPrecision(2)) : size ? v.toExponential(1).replace(/\.0e|e\+/, "e") : "0";
    if (unit) return +(v / unit[0]).toPrecision(3) + unit[1];
    return size >= 1000 ? Math.round(v).toLocaleString("en-US") : String(+v.toPrecision(size < 1 ? 3 : 4));
  }
  function nice(width, count) {
    const power = 10 ** Math.floor(Math.log10(width / count));
    return power * ([1, 2, 5].find(f => f * power >= width / count * (1 - 1e-9)) || 10);
  }
  function domain(chart) {
    const outside = view.from === null || view.to <= chart.f || view.from >= chart.l;
    return outside ? [chart.f, chart.l] : [Math.max(view.from, chart.f), Math.min(view.to, chart.l)];
  }
  // The points of a line inside the domain: position, index, value (smoothed if asked), and whether the line starts anew.
  function points(line, from, to) {
    const gaps = new Set(line.g);
    let mean = 0;
    return D.xs[line.x].map((x, i) => {
      const gap = !i || gaps.has(i);
      mean = gap || line.e ? line.y[i] : view.smooth * mean + (1 - view.smooth) * line.y[i];
      return { x, i, gap, y: mean };
    }).filter(p => p.x >= from && p.x <= to);
  }
  function stack(chart, parts, each) {
    const sums = new Map();
    chart.s.forEach((s, n) => {
      if (s.r) return;
      const below = new Map(sums);
      parts[n].forEach(p => sums.set(p.x, (sums.get(p.x) || 0) + p.y));
      if (each) each(s, parts[n], below, new Map(sums));
    });
    return sums;
  }
  function scaleOf(chart, parts) {
    if (chart.stack) {
      const sums = [...stack(chart, parts).values()].sort((a, b) => a - b), top = sums[sums.length - 1] || 1;
      const bound = 1.5 * sums[Math.floor(0.98 * (sums.length - 1))];
      return { low: 0, high: sums.length > 20 && bound > 0 && top > 2 * bound ? bound : top * 1.04, log: false };
    }
    const seen = [...chart.lim];
    chart.s.forEach((s, n) => parts[n].forEach(p => {
      seen.push(p.y, s.y[p.i]);
      if (!view.smooth) for (const key of ["lo", "hi", "bl", "bh"]) if (s[key]) seen.push(s[key][p.i]);
    }));
    let [low, high] = seen.length ? [Math.min(...seen), Math.max(...seen)] : [0, 1];
    const log = low > 0 && high > low && (view.scale === "log" || (view.scale === "auto" && (chart.log || high / low >= 1000)));
    if (log) return { low: low / 1.15, high: high * 1.15, log };
    if (view.from === null && chart.share && low >= 0 && high <= 1) return { low: 0, high: high > 0.5 || !high ? 1 : high * 1.1, log };
    if (view.from === null && low >= 0 && low < 0.5 * high) low = 0;
    const space = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    return { low: low && low - space, high: high || !low ? high + space : 0, log };
  }
  function height(scale, v) {
    const f = x => (scale.log ? Math.log10(Math.max(x, scale.low)) : x);
    return Math.round(Math.min(2, Math.max(-1, (f(scale.high) - f(v)) / (f(scale.high) - f(scale.low)))) * H);
  }
  function drawGrid(svg, chart, scale) {
    const marks = [], [low, high] = scale.log ? [Math.log10(scale.low), Math.log10(scale.high)] : [scale.low, scale.high];
    const step = scale.log ? Math.max(1, Math.ceil((high - low) / 5)) : nice(high - low, chart.small ? 2 : 4);
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) marks.push(scale.log ? 10 ** (n * step) : n * step);
    svg.querySelector(".grid").replaceChildren(...marks.flatMap(v => {
      const y = height(scale, v) / 10 + "%";
      return [make("line", { x1: 0, x2: "100%", y1: y, y2: y }), make("text", { x: -7, y, dy: ".32em" }, number(v))];
    }));
  }
  function drawSteps(svg, chart, from, to) {
    const nodes = [], step = Math.max(1, Math.round(nice(to - from, chart.small ? 3 : 6)));
    const stages = D.stages.filter(s => s.start + s.last - s.first > from && s.start < to), at = x => (x - from) / (to - from) * 100;
    const rule = (kind, x) => nodes.push(make("line", { class: kind, x1: x + "%", x2: x + "%", y1: 0, y2: "100%" }));
    for (const s of stages) {
      const end = at(s.start + s.last - s.first), start = at(s.start);
      for (let n = Math.ceil(s.first / step) * step; n <= s.last; n += step) {
        const x = at(s.start + n - s.first), last = s === stages[stages.length - 1];
        if (x > -0.01 && x < 100.01 && (last || end - x >= 6)) nodes.push(make("text", { x: x + "%", y: "100%", dy: 16 }, n.toLocaleString("en-US")));
      }
      if (start > 0) rule("stage", start);
      if (stages.length > 1 && !chart.small && (end - Math.max(0, start) > 1.8 * s.n.length || end >= 100)) nodes.push(make("text", { class: "stage", x: Math.max(0, start) + "%", dx: 1, y: 0, dy: -5 }, s.n));
    }
    D.restarts.filter(x => x > from && x < to).forEach(x => rule("restart", at(x)));
    svg.querySelector(".steps").replaceChildren(...nodes);
  }
  function drawInk(svg, chart, parts, scale, from, to) {
    const nodes = [], px = x => Math.round((x - from) / (to - from) * W), py = v => height(scale, v);
    const add = (kind, d) => nodes.push(make("path", { class: kind, d }));
    const path = (ps, y) => ps.map((p, n) => (n && !p.gap ? "L" : "M") + px(p.x) + " " + py(y(p))).join("");
    function band(kind, ps, low, high) {
      const runs = [];
      ps.forEach((p, n) => (n && !p.gap ? runs[runs.length - 1].push(p) : runs.push([p])));
      add(kind, runs.map(run => path(run.map(p => ({ ...p, gap: false })), high) + run.reverse().map(p => `L${px(p.x)} ${py(low(p))}`).join("") + "z").join(""));
    }
    if (chart.stack) {
      const sums = stack(chart, parts, (s, ps, below, above) => band("a a" + s.t, ps, p => below.get(p.x) || 0, p => above.get(p.x)));
      add("over", [...sums].filter(([, v]) => v > scale.high).map(([x]) => `M${px(x)} 0v60`).join(""));
    }
    const shown = chart.s.map((s, n) => [s, parts[n]]).filter(([s, ps]) => ps.length && (!chart.stack || s.r)).reverse();
    for (const [s, ps] of shown.filter(([s]) => !s.r && (s.e || !view.smooth))) {
      if (s.bl) band(`b b${s.t} wide`, ps, p => s.bl[p.i], p => s.bh[p.i]);
      if (s.lo) band("b b" + s.t, ps, p => s.lo[p.i], p => s.hi[p.i]);
    }
    for (const [s, ps] of shown) {
      if (view.smooth && !s.e) add(`l l${s.t} faint`, path(ps, p => s.y[p.i]));
      add(s.r ? "l ref" : "l l" + s.t, path(ps, p => p.y));
      if (s.d) add("d l" + s.t, ps.map(p => `M${px(p.x)} ${py(p.y)}h0`).join(""));
    }
    chart.lim.forEach(v => add("limit", `M0 ${py(v)}h${W}`));
    add("lost", chart.s.flatMap(s => s.lost || []).filter(x => x >= from && x <= to).map(x => `M${px(x)} ${H}v-40`).join(""));
    svg.querySelector(".ink").replaceChildren(...nodes);
  }
  function draw(svg) {
    const chart = chartOf(svg), [from, to] = domain(chart), parts = chart.s.map(s => points(s, from, to));
    const scale = scaleOf(chart, parts);
    drawGrid(svg, chart, scale);
    drawSteps(svg, chart, from, to);
    drawInk(svg, chart, parts, scale, from, to);
  }
  const visible = svg => svg.getClientRects().length > 0;
  function drawAll() { view.changed = true; plots.filter(visible).forEach(draw); byId("reset").hidden = view.from === null; }
  all("details").forEach(d => d.addEventListener("toggle", () => view.changed && d.open && plots.filter(svg => d.contains(svg)).forEach(draw)));
  function xAt(svg, event) {
    const box = svg.getBoundingClientRect(), [from, to] = domain(chartOf(svg));
    return from + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (to - from);
  }
  function clear() { tip.hidden = true; all(".cursor").forEach(node => node.remove()); }
  function hover(svg, event) {
    const chart = chartOf(svg), at = xAt(svg, event), near = xs => xs.reduce((best, x, n) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? n : best), 0);
    const rows = chart.s.filter(s => s.y.length).map(s => [s, near(D.xs[s.x])]);
    clear();
    if (!rows.length) return;
    const shown = D.xs[rows[0][0].x][rows[0][1]];
    const stage = D.stages.filter(s => s.start <= shown).pop(), step = Math.round(shown - stage.start + stage.first), count = Math.max(...chart.s.map(s => s.c || 1));
    const lines = rows.filter(([s, i]) => Math.abs(D.xs[s.x][i] - shown) <= (chart.l - chart.f) / 20).map(([s, i]) => {
      const [low, high] = s.lo && s.hi[i] > s.lo[i] ? [s.lo[i], s.hi[i]] : s.bl ? [s.bl[i], s.bh[i]] : [];
      const value = number(s.y[i]) + (low === undefined ? "" : ` (${number(low)} to ${number(high)})`), row = element("div", {});
      row.append(element("span", { className: s.r ? "dot dash" : "dot t" + s.t }), s.n + " ", element("b", { textContent: value }));
      return row;
    });
    const title = `${stage.n}, step ${step.toLocaleString("en-US")}` + (count > 1 ? `, mean of up to ${count} steps` : "");
    tip.replaceChildren(element("div", { className: "at", textContent: title }), ...lines);
    tip.hidden = false;
    tip.style.left = Math.max(4, Math.min(event.pageX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = event.pageY + 16 + "px";
    for (const other of plots.filter(visible)) {
      const [from, to] = domain(chartOf(other)), x = (shown - from) / (to - from) * 100 + "%";
      if (shown >= from && shown <= to) other.append(make("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: "100%" }));
    }
  }
  for (const svg of plots) {
    let start = null, box = null;
    const ends = e => [start, xAt(svg, e)].sort((a, b) => a - b);
    svg.addEventListener("pointerdown", e => { if (e.pointerType === "mouse" && !e.button) { start = xAt(svg, e); svg.setPointerCapture(e.pointerId); } });
    svg.addEventListener("pointermove", e => {
      if (start !== null) {
        const [from, to] = domain(chartOf(svg)), [a, b] = ends(e).map(x => (x - from) / (to - from) * 100);
        if (box) box.remove();
        svg.append(box = make("rect", { class: "pick", x: a + "%", width: b - a + "%", y: 0, height: "100%" }));
      }
      hover(svg, e);
    });
    svg.addEventListener("pointerup", e => {
      const [from, to] = domain(chartOf(svg)), [a, b] = ends(e), zoom = box && b - a > (to - from) / 50;
      if (box) box.remove();
      start = box = null;
      if (zoom) { [view.from, view.to] = [a, b]; clear(); drawAll(); }
    });
    svg.addEventListener("pointerleave", () => { if (start === null) clear(); });
    svg.addEventListener("dblclick", reset);
  }
  function reset() { view.from = view.to = null; drawAll(); }
  all(".tools").forEach(node => { node.hidden = false; });
  const listen = (id, kind, act) => byId(id) && byId(id).addEventListener(kind, act);
  listen("reset", "click", reset);
  listen("smooth", "input", e => { view.smooth = +e.target.value; drawAll(); });
  listen("scale", "change", e => { view.scale = e.target.value; drawAll(); });
  listen("words", "input", filter);
  let kind = "";
  function filter() {
    const words = byId("words").value.toLowerCase();
    for (const s of all(".sample")) s.hidden = !((!kind || s.dataset.why.split("|").includes(kind)) && s.textContent.toLowerCase().includes(words));
  }
  for (const button of all("[data-kind]")) button.addEventListener("click", () => {
    kind = button.dataset.kind;
    all("[data-kind]").forEach(b => b.setAttribute("aria-pressed", String(b === button)));
    filter();
  });
})();
