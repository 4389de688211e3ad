// The page of `rl view`. Texts of a run enter the document as text nodes only.
"use strict";

const $ = (id) => document.getElementById(id);
const STATIC = document.querySelector("meta[name=duet-mode]").content === "static";
const HEADER = "x-duet-token", FOLLOW = 2000, PER_CHUNK = 50;
const TRAINED = 1, FLAGS = {1: "trained", 2: "stop", 4: "clipped low", 8: "clipped high", 16: "dropped"};
const COLOURS = {mask: "mask", logp: "log-probability", gap: "gap", entropy: "entropy", advantage: "advantage"};
const state = {query: "", sort: "", next: null, generation: -1, busy: 0, chosen: "", colour: "logp", sample: null};

// A token in the fragment is kept for this tab, and leaves the address bar.
const fragment = new URLSearchParams(location.hash.slice(1));
if (fragment.has("token")) {
  sessionStorage.setItem("duet-token", fragment.get("token"));
  fragment.delete("token");
  history.replaceState(null, "", location.pathname + (String(fragment) ? "#" + fragment : ""));
}

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const count = (value) => value.toLocaleString("en-US");
const real = (value) => value === null || value === undefined ? "–" : String(Number(value.toPrecision(4)));

// What to type where nothing serves the page: browsers read no data from the folder of a page that is opened as a file.
function serve() {
  if (!STATIC) return "type: rl view RUN";
  if (location.protocol !== "file:") return "start its server again, for example: python -m http.server -d FOLDER";
  const folder = decodeURIComponent(location.pathname).replace(/\/[^/]*$/, "").replace(/^\/(?=[A-Za-z]:)/, "") || "/";
  const word = /^[\w@%+=:,./-]+$/.test(folder) ? folder : `'${folder.replaceAll("'", `'"'"'`)}'`;
  return `type: python -m http.server -d ${word}   then open http://localhost:8000`;
}

function answerOf(path, options) {
  return fetch(path, options).catch(() => { throw new Error(`${path}: nothing answers; ${serve()}`); });
}

async function fetched(path) {
  const answer = await answerOf(path, STATIC ? {} : {headers: {[HEADER]: sessionStorage.getItem("duet-token") || ""}});
  const value = await answer.json().catch(() => ({error: `${path}: the server answered ${answer.status}`}));
  if (!answer.ok) throw new Error(value.error || `${path}: the server answered ${answer.status}`);
  return value;
}

// The filters of a static page: numbers, names, and words in the beginnings of prompt and completion.
const NUMBERS = {step: "step", reward: "reward", len: "len", adv: "advantage", gap: "gap", prompt: "prompt_id", sample: "sample", version: "version"};
function predicate(query) {
  const number = "[-+]?(?:\\d+\\.?\\d*|\\.\\d+)(?:e[-+]?\\d+)?", terms = query.match(/-?"(?:[^"\\]|\\.)*"|\S+/g) || [];
  const compared = new RegExp(`^([a-z_]+)(?:\\.([^<>=!:]+))?(<=|>=|!=|<|>|=|:)(.+)$`), range = new RegExp(`^(${number})?-(${number})?$`, "i");
  const tests = terms.map((full) => {
    const negated = full.length > 1 && full[0] === "-", term = negated ? full.slice(1) : full, match = compared.exec(term);
    const test = match ? comparison(term, match, range) : plain(term);
    return (item) => test(item) !== negated;
  });
  return (item) => tests.every((test) => test(item));
}

function comparison(term, [, field, name, op, value], range) {
  if (field === "stage" || field === "finish") return (item) => (item[field] === value) === (op !== "!=");
  if (field === "fault") return (item) => item.faults.includes(value) === (op !== "!=");
  if (!(field in NUMBERS)) throw new Error(`filter: ${term}: no such field (valid: ${Object.keys(NUMBERS).join(", ")}, stage, finish, fault)`);
  const of = (item) => name ? item.rewards[name] : item[NUMBERS[field]];
  const span = Number.isNaN(Number(value)) && (op === ":" || op === "=") ? range.exec(value) : null, bound = Number(value);
  if (!span && Number.isNaN(bound)) throw new Error(`filter: ${term}: ${value} is no number`);
  const holds = span ? (x) => x >= Number(span[1] ?? -Infinity) && x <= Number(span[2] ?? Infinity)
    : {"<": (x) => x < bound, "<=": (x) => x <= bound, ">": (x) => x > bound, ">=": (x) => x >= bound, "!=": (x) => x !== bound}[op] || ((x) => x === bound);
  return (item) => { const x = of(item); return x !== null && x !== undefined && holds(x); };
}

function plain(term) {
  if (term === "eval") return (item) => item.eval;
  if (term === "fault") return (item) => item.faults.length > 0;
  if (term === "unscored") return (item) => item.reward === null;
  if (term === "signal") return (item) => Boolean(item.advantage);
  const words = (term[0] === '"' ? term.slice(1, -1).replace(/\\(.)/g, "$1") : term).toLowerCase();
  return (item) => (item.prompt + "\n" + item.completion).toLowerCase().includes(words);
}

// A folder of --static holds the same answers: pages of the list, and chunks of samples.
const source = STATIC ? {
  run: () => fetched("data/run.json"),
  async samples(query, after) {
    const run = await fetched("data/run.json"), meets = predicate(query), items = [];
    let page = after ? Number(after) : 0;
    while (page < run.pages && items.length < PER_CHUNK) items.push(...(await fetched(`data/list-${page++}.json`)).filter(meets));
    const matches = query.trim() === "" ? run.total : page < run.pages ? null : items.length;
    return {items, matches: after && matches !== run.total ? null : matches, total: run.total, pending: 0, generation: 0, next: page < run.pages ? String(page) : null};
  },
  async sample(id) {
    const number = Number(id);
    return (await fetched(`data/samples-${Math.floor(number / PER_CHUNK)}.json`))[number % PER_CHUNK];
  },
  events: async () => ({events: [], next: 0}),
} : {
  run: () => fetched("api/run"),
  samples: (query, after, sort) => fetched("api/samples?" + new URLSearchParams({q: query, sort, ...(after ? {after} : {})})),
  sample: (id) => fetched("api/sample/" + encodeURIComponent(id)),
  events: (after) => fetched("api/events?after=" + after),
};

function fail(error) {
  $("error").textContent = error.message;
  $("error").hidden = false;
}

// ---- the list

async function load(more) {
  const mine = more ? state.busy : ++state.busy;
  if (more && (!state.next || state.loading)) return;
  state.loading = true;
  try {
    const page = await source.samples(state.query, more ? state.next : null, state.sort);
    if (mine !== state.busy) return;
    $("error").hidden = true;
    if (!more) $("list").replaceChildren();
    $("list").append(...page.items.map(line));
    state.next = page.next;
    state.generation = page.generation;
    $("fresh").hidden = true;
    const part = page.pending ? `, ${(page.pending / 1e6).toFixed(0)} MB are not indexed yet` : "";
    $("count").textContent = page.matches === null ? `matches among ${count(page.total)} samples` : `${count(page.matches)} of ${count(page.total)} samples${part}`;
    mark();
  } catch (error) {
    if (mine === state.busy) fail(error);
  } finally {
    state.loading = false;
  }
}

function line(item) {
  const tags = [
    ...(item.finish === "length" ? [make("span", {class: "tag"}, "cut off")] : []),
    ...item.faults.map((kind) => make("span", {class: "tag"}, kind)),
    ...(item.eval ? [make("span", {class: "tag plain"}, "eval")] : []),
  ];
  return make("li", {"data-id": item.id, onclick: () => choose(item.id)},
    make("div", {class: "row"}, `${item.stage} ${item.step}`, make("span", {}, `prompt ${item.prompt_id}/${item.sample}`),
      make("span", {}, `${item.len} tokens`), ...tags, make("span", {class: "score"}, real(item.reward))),
    make("div", {class: "peek"}, make("i", {}, item.prompt + " → "), item.completion));
}

function mark() {
  for (const item of $("list").children) item.setAttribute("aria-current", item.dataset.id === state.chosen);
}

function step(by) {
  const items = [...$("list").children], place = items.findIndex((item) => item.dataset.id === state.chosen);
  const next = items[Math.min(Math.max(place + by, 0), items.length - 1)];
  if (next) { next.scrollIntoView({block: "nearest"}); choose(next.dataset.id); }
}

function search(query) {
  $("query").value = state.query = query;
  keep();
  $("left").scrollTop = 0;
  return load(false);
}

function keep() {
  const kept = new URLSearchParams();
  if (state.query) kept.set("q", state.query);
  if (state.chosen) kept.set("id", state.chosen);
  history.replaceState(null, "", location.pathname + (String(kept) ? "#" + kept : ""));
}

// ---- one sample

async function choose(id) {
  state.chosen = id;
  keep();
  mark();
  try {
    const sample = await source.sample(id);
    if (state.chosen !== id) return;
    state.sample = sample;
    $("error").hidden = true;
    show();
    $("right").scrollTop = 0;
  } catch (error) {
    fail(error);
  }
}

function show() {
  const s = state.sample, record = s.record;
  const facts = [
    ["reward", real(s.reward)], ...Object.entries(s.rewards).map(([name, value]) => [name, real(value)]),
    ["advantage", real(s.advantage)], ["gap", real(s.gap)], ["tokens", `${record.n_prompt ?? "–"} + ${s.len}`], ["finish", s.finish],
    ["version", s.version < 0 ? "–" : s.version],
  ];
  $("right").replaceChildren(
    make("h2", {}, `${s.stage} step ${s.step}, prompt ${s.prompt_id}/${s.sample}${s.eval ? ", evaluation" : ""}`),
    make("div", {class: "facts"}, ...facts.map(([name, value]) => make("div", {}, make("span", {}, name + " "), String(value)))),
    ...faults(record), ...strip(s),
    ...texts(s),
    ...logs("what the rewards said", record.reward_log), ...logs("columns of the row", record.columns),
    ...relatives("group: completions of this prompt", s.group, true), ...relatives("the same row at other steps", s.others, false));
}

function faults(record) {
  return Object.entries(record.faults || {}).map(([name, kind]) => make("p", {}, make("span", {class: "tag"}, `${name}: ${kind}`)));
}

function texts(s) {
  const all = [...s.messages.prompt.map((one) => ["prompt", ...one]), ...s.messages.completion.map((one) => ["completion", ...one])];
  return [make("h3", {}, "messages"), ...all.map(([name, role, pieces]) => {
    const size = pieces.reduce((sum, one) => sum + (typeof one === "string" ? one.length : 0), 0);
    const shown = pieces.filter((one) => typeof one !== "string" || one.trim());
    const details = make("details", {}, make("summary", {}, `${name}${role ? ": " + role : ""} (${count(size)} characters)`),
      ...(shown.length ? shown : [""]).map((one) => typeof one === "string" ? make("pre", {}, one) : media(one)));
    details.open = all.length <= 4;
    return details;
  })];
}

// A picture or sound in the place of its part. Its files need the token, so they are fetched and not linked. Single
// pixels of tiny pictures are shown as squares.
const SIDE = 160, LEAST = 6, TINY = 64, loaded = new Map();
function address(one) {
  if (STATIC) return Promise.resolve("media/" + one.thumbnail);
  if (!loaded.has(one.digest)) loaded.set(one.digest, fetchedFile("api/media/" + one.digest).catch((error) => { loaded.delete(one.digest); throw error; }));
  return loaded.get(one.digest);
}

async function fetchedFile(path) {
  const answer = await answerOf(path, {headers: {[HEADER]: sessionStorage.getItem("duet-token") || ""}});
  if (!answer.ok) throw new Error(`${path}: the server answered ${answer.status}`);
  return URL.createObjectURL(await answer.blob());
}

function media(one) {
  const about = make("span", {}, one.about);
  if (!one.thumbnail || !(one.width > 0 && one.height > 0)) return make("div", {class: "media"}, about);
  const image = make("img", {alt: one.about}), scale = SIDE / Math.max(one.width, one.height);
  sized(image, one, scale);
  const button = make("button", {type: "button", title: "larger", onclick: () => enlarge(one, image.src)}, image);
  address(one).then((url) => { image.src = url; }, () => button.remove());
  return make("div", {class: "media"}, button, about);
}

function sized(image, one, scale) {
  image.style.width = Math.max(LEAST, Math.round(one.width * scale)) + "px";
  image.style.height = Math.max(LEAST, Math.round(one.height * scale)) + "px";
  image.classList.toggle("tiny", Math.max(one.width, one.height) <= TINY);
}

function enlarge(one, url) {
  const image = make("img", {alt: one.about, src: url});
  sized(image, one, Math.min(innerWidth * 0.88 / one.width, innerHeight * 0.76 / one.height, 768 / Math.max(one.width, one.height)));
  $("large").replaceChildren(image, make("p", {}, one.about), make("button", {type: "button", onclick: () => $("large").close()}, "close"));
  $("large").showModal();
}

function logs(title, values) {
  const entries = Object.entries(values || {});
  if (!entries.length) return [];
  return [make("h3", {}, title), make("pre", {}, entries.map(([name, value]) => `${name}: ${value}`).join("\n"))];
}

function relatives(title, items, samples) {
  if (!items.length) return [];
  const head = make("tr", {}, make("th", {class: "l"}, samples ? "sample" : "step"), ...["reward", "advantage", "tokens", "gap"].map((name) => make("th", {}, name)), make("th", {class: "l"}, samples ? "completion" : ""));
  const rows = items.map((item) => make("tr", {class: item.id === state.chosen ? "own" : null},
    make("td", {class: "l"}, make("a", {href: "#", onclick: (event) => { event.preventDefault(); choose(item.id); }},
      samples ? `${item.sample}` : `${item.stage} ${item.step}/${item.sample}`)),
    ...[real(item.reward), real(item.advantage), item.len, real(item.gap)].map((value) => make("td", {}, String(value))),
    make("td", {class: "l"}, [item.finish === "length" ? "cut off" : "", ...item.faults, item.eval ? "eval" : "", item.completion || ""].filter(Boolean).join(", "))));
  const rewards = items.map((item) => item.reward).filter((value) => value !== null);
  const mean = rewards.length ? `, mean reward ${real(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
  return [make("h3", {}, `${title} (${items.length}${mean})`), make("div", {class: "wide"}, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)))];
}

// ---- tokens

function strip(s) {
  const t = s.tokens;
  if (!t.id.length) return [make("h3", {}, "tokens"), make("p", {class: "empty"}, "No tokens were recorded.")];
  const buttons = t.logp ? Object.entries(COLOURS).map(([key, name]) => make("button", {"data-colour": key, "aria-pressed": key === state.colour, onclick: () => { state.colour = key; paint(); }}, name)) : [];
  const nodes = runs(s).map(([place, times]) => {
    const id = t.id[place], kind = given(t, place) ? " prompt" : "";
    const more = times > 1 ? make("u", {}, ` × ${count(times)}`) : null;
    if (!t.text) return make("span", {class: "t id" + kind, "data-place": place}, String(id), more);
    const parts = t.text[place].split("\n").flatMap((text, number) => number ? [make("u", {}, "⏎"), "\n", text] : [text]);
    return make("span", {class: "t" + kind, "data-place": place}, ...(t.text[place] === "" ? [make("u", {}, "·")] : parts), more);
  });
  const box = make("div", {id: "strip"}, ...nodes);
  box.addEventListener("mouseover", (event) => tip(event));
  box.addEventListener("click", (event) => tip(event));
  box.addEventListener("mouseleave", () => { $("tip").hidden = true; });
  queueMicrotask(paint);
  return [make("h3", {}, `tokens${t.text ? "" : " (ids: the run has no tokenizer here)"}`), make("div", {class: "tools"}, ...buttons), box, make("p", {class: "legend", id: "legend"})];
}

// Returns whether a token is of the prompt or of an environment, not of the policy, whose tokens have a log-probability.
function given(t, place) {
  return t.turn && (t.turn[place] === 0 || t.logp && t.logp[place] === null);
}

// Returns [place, times] of the tokens that are shown: the rows of a picture or sound have one token, which is shown once.
function runs(s) {
  const t = s.tokens, shown = [], rows = (s.record.media || []).length > 0;
  for (let place = 0; place < t.id.length; place++) {
    const last = shown[shown.length - 1], prompt = given(t, place);
    if (rows && prompt && last && t.id[last[0]] === t.id[place]) last[1]++;
    else shown.push([place, 1]);
  }
  return shown.flatMap(([place, times]) => times >= 4 ? [[place, times]] : Array.from({length: times}, (_, more) => [place + more, 1]));
}

// Both signs: blue below 0, orange above. One sign: the larger, the deeper.
function paint() {
  const t = state.sample.tokens, key = state.colour;
  if (!t.logp || !$("strip")) return;
  for (const button of document.querySelectorAll("[data-colour]")) button.setAttribute("aria-pressed", button.dataset.colour === key);
  const values = key === "mask" ? t.flags.map((flags) => flags & TRAINED ? 1 : 0) : key === "logp" ? t.logp.map((x) => x === null ? null : -x) : t[key];
  const most = Math.max(1e-9, ...values.map((x) => Math.abs(x ?? 0)));
  const full = key === "logp" ? Math.max(1, most) : most;
  [...$("strip").children].forEach((node) => {
    const x = values[Number(node.dataset.place)], share = x === null ? 0 : Math.min(1, Math.abs(x) / full) * 0.75;
    node.style.backgroundColor = share ? `rgba(var(${x < 0 ? "--low" : key === "mask" ? "--low" : "--high"}), ${share.toFixed(3)})` : "";
  });
  const both = values.some((x) => x < 0), shown = key === "logp" ? -full : full;
  const about = {mask: "trained on", logp: "the generator's log-probability", gap: "trainer less generator, log-probability", entropy: "nats", advantage: "advantage"}[key];
  $("legend").replaceChildren(...(key === "mask" ? [about] : [both ? real(-full) : "0", make("span", {class: "bar " + (both ? "both" : "one")}), `${real(shown)}: ${about}`]));
}

function tip(event) {
  const node = event.target.closest(".t");
  if (!node) { $("tip").hidden = true; return; }
  const t = state.sample.tokens, place = Number(node.dataset.place);
  const rows = [["position", place], ["id", t.id[place]]];
  if (t.logp) {
    const logp = t.logp[place];
    rows.push(["turn", t.turn[place] === 0 ? "prompt" : t.turn[place]], ["log-probability", real(logp)], ["probability", logp === null ? "–" : real(Math.exp(logp))],
      ["gap", real(t.gap[place])], ["entropy", real(t.entropy[place])], ["advantage", real(t.advantage[place])],
      ["flags", Object.entries(FLAGS).filter(([bit]) => t.flags[place] & bit).map(([, name]) => name).join(", ") || "–"]);
  }
  $("tip").replaceChildren(make("b", {}, t.text ? JSON.stringify(t.text[place]) : String(t.id[place])),
    make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))])));
  $("tip").hidden = false;
  const at = node.getClientRects()[0], own = $("tip").getBoundingClientRect();
  $("tip").style.left = Math.max(4, Math.min(at.left, innerWidth - own.width - 8)) + "px";
  $("tip").style.top = (at.bottom + own.height + 8 < innerHeight ? at.bottom + 6 : Math.max(4, at.top - own.height - 6)) + "px";
}

// ---- a run that goes on

let events = 0, last = null;
async function follow() {
  try {
    const run = await source.run();
    document.title = `${run.name} - rl view`;
    $("name").textContent = run.name;
    for (let more = true; more;) {
      const answer = await source.events(events);
      more = answer.next > events;
      events = answer.next;
      for (const row of answer.events) if (row.metrics && row.stage) last = row;
    }
    const mean = last && last.metrics["reward/mean"];
    $("state").textContent = last ? `${last.stage} step ${last.step}${typeof mean === "number" ? `, reward ${real(mean)}` : ""}` : "";
    if (run.generation !== state.generation && !state.loading) {
      if ($("left").scrollTop < 40) await load(false);
      else { $("fresh").hidden = false; $("fresh").textContent = "the run has new samples: show them"; }
    }
  } catch (error) {
    fail(error);
  }
  if (!STATIC) setTimeout(follow, FOLLOW);
}

let typing = 0;
$("query").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(() => search($("query").value), 250); });
$("search").addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(typing); search($("query").value); });
$("sort").addEventListener("change", () => { state.sort = $("sort").value; search(state.query); });
$("fresh").addEventListener("click", () => search(state.query));
$("left").addEventListener("scroll", () => { if ($("left").scrollTop + $("left").clientHeight > $("left").scrollHeight - 600) load(true); });
document.addEventListener("keydown", (event) => {
  if ($("large").open) return;
  if (event.target.matches("input, select")) { if (event.key === "Escape") event.target.blur(); return; }
  if (event.key === "/") { event.preventDefault(); $("query").focus(); }
  if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
});
$("large").addEventListener("click", (event) => { if (event.target === $("large") || event.target.matches("img")) $("large").close(); });
if (STATIC) $("sort").hidden = true;
if (location.protocol === "file:") {
  fail(new Error(`This page was opened as a file, and shows samples only from a server; ${serve()}`));
} else {
  search(fragment.get("q") || "");
  if (fragment.get("id")) choose(fragment.get("id"));
  follow();
}
