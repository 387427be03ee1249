// Keeps the in-flight pages up to date. Everything works without it; nothing is ever put in as HTML.

const ENDED_FOR_MS = 2500;
const RECONNECT_MS = 3000;

const main = document.getElementById("content-main");
const body = main?.querySelector("[data-rows]");
const template = main?.querySelector("[data-row-template]");

// --- Times that run on: shown from the store's clock, which the server tells with each message ---

let clockOffset = 0;

function duration(ms) {
  if (ms < 0) return ms <= -1000 ? `-${duration(-ms)}` : "0.00 s";
  const seconds = ms / 1000;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.floor(seconds);
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function tick() {
  const now = Date.now() + clockOffset;
  for (const node of main.querySelectorAll("[data-since], [data-until]")) {
    const ms = node.dataset.since ? now - Number(node.dataset.since) : Number(node.dataset.until) - now;
    setText(node.querySelector("[data-value]"), duration(ms));
  }
}

// --- Rows ---

function applyCell(node, cell) {
  const value = node.querySelector("[data-value]");
  for (const name of ["since", "until"]) {
    if (cell[name]) node.dataset[name] = cell[name];
    else delete node.dataset[name];
  }
  if (!cell.since && !cell.until) setText(value, cell.text ?? "");
  if (cell.link && value.tagName === "A") value.href = cell.link;
  if (cell.hint) node.title = cell.hint;
  else node.removeAttribute("title");
  node.classList.toggle("tone-warn", cell.tone === "warn");
  node.classList.toggle("tone-bad", cell.tone === "bad");
}

function applyCells(holder, cells) {
  for (const [name, cell] of Object.entries(cells)) {
    const node = holder.querySelector(`[data-col="${CSS.escape(name)}"]`);
    if (node) applyCell(node, cell);
  }
}

const holders = new Map();
for (const node of main?.querySelectorAll("[data-id]") ?? []) holders.set(node.dataset.id, node);

function makeRow(id) {
  const row = template.content.firstElementChild.cloneNode(true);
  row.dataset.id = id;
  const box = row.querySelector("input[type=checkbox]");
  if (box) {
    box.value = id;
    box.setAttribute("aria-label", `Select ${id}`);
  }
  holders.set(id, row);
  return row;
}

function markEnded(id, how) {
  const holder = holders.get(id);
  if (!holder || holder.classList.contains("ended")) return;
  applyCells(holder, { phase: { text: how } });
  for (const node of holder.querySelectorAll("[data-since], [data-until]")) {
    delete node.dataset.since;
    delete node.dataset.until;
  }
  holder.classList.add("ended");
  const box = holder.querySelector("input[type=checkbox]");
  if (box) {
    box.checked = false;
    box.disabled = true;
    updateSelection();
  }
  if (!body) return;
  setTimeout(() => removeRow(id), ENDED_FOR_MS);
}

function removeRow(id) {
  const row = holders.get(id);
  if (!row || !body) return;
  row.remove();
  holders.delete(id);
  updateSelection();
  showEmpty();
}

function reorder(order) {
  const wanted = new Set(order);
  for (const [id, row] of holders) {
    if (!wanted.has(id) && !row.classList.contains("ended")) removeRow(id);
  }
  // Rows that are ending keep their place; the others follow the order given.
  let place = body.firstElementChild;
  for (const id of order) {
    let row = holders.get(id);
    if (!row) row = makeRow(id);
    while (place?.classList.contains("ended") && place !== row) place = place.nextElementSibling;
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
  }
  showEmpty();
}

function showEmpty() {
  const empty = main.querySelector("[data-empty]");
  if (empty) empty.hidden = body.childElementCount > 0;
}

function apply(message) {
  if (message.now) clockOffset = message.now - Date.now();
  for (const [id, how] of Object.entries(message.ended ?? {})) markEnded(id, how);
  if (message.reset && !body) {
    for (const id of holders.keys()) if (!message.order?.includes(id)) markEnded(id, "ended");
  }
  if (body && (message.order || message.reset)) reorder(message.order ?? []);
  for (const [id, cells] of Object.entries(message.cells ?? {})) {
    const holder = holders.get(id);
    if (holder) applyCells(holder, cells);
  }
  for (const [name, count] of Object.entries(message.counts ?? {})) {
    for (const node of main.querySelectorAll(`[data-count="${CSS.escape(name)}"]`)) setText(node, String(count));
  }
  if (message.counts) {
    linkPages(message.counts);
    const all = main.querySelector("[data-needs-matches]");
    if (all) all.disabled = message.counts.matched === 0;
  }
  tick();
}

/** The list may have grown beyond this page, or shrunk: the links to its neighbours follow. */
function linkPages({ page, pages }) {
  for (const [rel, number] of [["prev", page - 1], ["next", page + 1]]) {
    const link = main.querySelector(`.inflight-pages a[rel="${rel}"]`);
    if (!link) continue;
    const query = new URLSearchParams(location.search);
    query.set("page", number);
    link.href = `?${query}`;
    link.hidden = number < 1 || number > pages;
  }
}

// --- The event stream: open while the tab is seen, closed while it is hidden ---

let stream = null;
let retry = 0;

function showState(state, text) {
  const node = main.querySelector("[data-state]");
  if (!node) return;
  node.dataset.state = state;
  setText(node, text);
}

function connect() {
  clearTimeout(retry);
  if (stream || document.hidden) return;
  stream = new EventSource(main.dataset.live);
  stream.onopen = () => showState("live", "live");
  stream.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (message.bye) {
      disconnect();
      retry = setTimeout(connect, 500);
    } else if (message.problem) {
      showState("problem", message.problem);
    } else {
      showState("live", "live");
      apply(message);
    }
  };
  stream.onerror = () => {
    showState("problem", "connection lost, trying again");
    disconnect();
    retry = setTimeout(connect, RECONNECT_MS);
  };
}

function disconnect() {
  stream?.close();
  stream = null;
}

// --- Selection ---

function updateSelection() {
  if (!body) return;
  const boxes = [...body.querySelectorAll("input[type=checkbox]:not(:disabled)")];
  const chosen = boxes.filter((box) => box.checked).length;
  const button = main.querySelector("[data-needs-selection]");
  if (button) {
    button.disabled = chosen === 0;
    setText(button, chosen ? `Cancel selected (${chosen})` : "Cancel selected");
  }
  const all = main.querySelector("[data-select-all]");
  if (all) {
    all.checked = chosen > 0 && chosen === boxes.length;
    all.indeterminate = chosen > 0 && chosen < boxes.length;
  }
}

function watchSelection() {
  const all = main.querySelector("[data-select-all]");
  if (!all) return;
  all.hidden = false;
  all.addEventListener("change", () => {
    for (const box of body.querySelectorAll("input[type=checkbox]:not(:disabled)")) box.checked = all.checked;
    updateSelection();
  });
  body.addEventListener("change", updateSelection);
  updateSelection();
}

// --- Pages without a stream: fetched anew every few seconds while seen and not in use ---

async function refresh() {
  if (document.hidden || main.contains(document.activeElement)) return;
  try {
    const reply = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (reply.redirected) return;
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    const fresh = page.getElementById("content-main");
    if (!fresh || main.contains(document.activeElement)) return;
    const scrolled = [...main.querySelectorAll(".scroll")].map((node) => node.scrollLeft);
    main.replaceChildren(...fresh.childNodes);
    main.querySelectorAll(".scroll").forEach((node, i) => { node.scrollLeft = scrolled[i] ?? 0; });
  } catch {
    // The next round tries again.
  }
}

if (main?.dataset.live) {
  if (main.dataset.now) clockOffset = Number(main.dataset.now) - Date.now();
  setInterval(() => { if (!document.hidden) tick(); }, 1000);
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      disconnect();
      showState("paused", "paused");
    } else {
      connect();
    }
  });
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
  watchSelection();
  connect();
} else if (main?.dataset.refresh) {
  setInterval(refresh, Number(main.dataset.refresh) * 1000);
}
