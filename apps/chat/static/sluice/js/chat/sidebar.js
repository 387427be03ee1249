/** The list of conversations: search, rename, pin, export, delete. */

import { call } from "./api.js";
import { $, announce, ask, place, stamp } from "./dom.js";

export class Sidebar {
  /** @param {object} hooks `open(id)`, `fresh()`, `changed(conversation)`, `deleted(id)`, `busy(id)` */
  constructor(hooks) {
    this.hooks = hooks;
    this.current = null;
    this.items = [];
    this.more = false;
    this.query = "";
    /** Lists that were asked for, and changes made here: a late list knows nothing of them. */
    this.asked = this.changes = 0;
    this.menuFor = null;
    $("list").addEventListener("click", (event) => this.clicked(event));
    $("row-menu").addEventListener("click", (event) => this.chosen(event));
    $("row-menu").addEventListener("keydown", arrows);
    $("row-menu").addEventListener("toggle", (event) => event.newState === "closed" && this.back());
    $("account-menu").addEventListener("keydown", arrows);
    $("new-chat").addEventListener("click", () => hooks.fresh());
    $("search").addEventListener("input", () => this.search());
    $("search").addEventListener("keydown", (event) => this.searchKey(event));
    $("open-sidebar").addEventListener("click", () => this.show(true));
    $("close-sidebar").addEventListener("click", () => this.show(false));
    $("scrim").addEventListener("click", () => this.show(false));
  }

  get isOpen() {
    return $("sidebar").classList.contains("open");
  }

  /** On narrow windows the list covers the thread. */
  show(open) {
    $("sidebar").classList.toggle("open", open);
    $("scrim").hidden = !open;
    $("open-sidebar").setAttribute("aria-expanded", String(open));
    if (open) $("close-sidebar").focus();
    else if ($("sidebar").contains(document.activeElement)) $("open-sidebar").focus();
  }

  set(part) {
    this.items = part.conversations;
    this.more = part.more;
    this.draw();
  }

  /** Fetch the list anew; done once what was asked for last is shown. */
  refresh() {
    return (this.newest = this.fetch());
  }

  async fetch() {
    const { query, changes } = this;
    const mine = (this.asked += 1);
    const part = await call("GET", `conversations?q=${encodeURIComponent(query)}`);
    if (query !== this.query) return;
    if (mine !== this.asked) await this.newest;
    else if (changes !== this.changes) await this.refresh();
    else this.set(part);
  }

  /** A conversation is new or has changed. */
  put(conversation) {
    this.changes += 1;
    if (this.query && !this.items.some((item) => item.id === conversation.id)) return;
    this.items = this.items.filter((item) => item.id !== conversation.id);
    this.items.push(conversation);
    this.items.sort((a, b) => b.pinned - a.pinned || b.updated_at.localeCompare(a.updated_at));
    this.draw();
  }

  select(id) {
    this.current = id;
    this.draw();
  }

  draw() {
    const list = $("list");
    const held = list.contains(document.activeElement) ? document.activeElement : null;
    const row = held?.closest(".row-item")?.dataset.id;
    list.replaceChildren();
    for (const [name, items] of sections(this.items, Boolean(this.query))) {
      const heading = document.createElement("h2");
      heading.textContent = name;
      const rows = document.createElement("ul");
      rows.append(...items.map((item) => this.row(item)));
      list.append(heading, rows);
    }
    if (!this.items.length) list.append(note(this.query ? "Nothing found." : "Your conversations will be listed here."));
    if (this.more) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "button small wide";
      button.textContent = "Show more";
      button.addEventListener("click", () => this.loadMore().catch((error) => announce(error.message)));
      list.append(button);
    }
    if (held) (list.querySelector(`[data-id="${row}"] ${held.matches(".more") ? ".more" : "a"}`) ?? list).focus();
  }

  row(item) {
    const row = stamp("t-row");
    const link = row.querySelector("a");
    row.dataset.id = item.id;
    row.classList.toggle("current", item.id === this.current);
    link.href = `/c/${item.id}/`;
    if (item.id === this.current) link.setAttribute("aria-current", "page");
    row.querySelector(".name").textContent = item.title;
    link.title = item.title;
    row.querySelector(".pinned").hidden = !item.pinned;
    row.querySelector(".busy-dot").hidden = !this.hooks.busy(item.id);
    row.querySelector(".more").setAttribute("aria-label", `Options for ${item.title}`);
    return row;
  }

  async loadMore() {
    const query = this.query;
    const part = await call("GET", `conversations?q=${encodeURIComponent(query)}&offset=${this.items.length}`);
    if (query !== this.query) return;
    const known = new Set(this.items.map((item) => item.id));
    this.items.push(...part.conversations.filter((item) => !known.has(item.id)));
    this.more = part.more;
    this.draw();
  }

  clicked(event) {
    const row = event.target.closest(".row-item");
    if (!row) return;
    const more = event.target.closest(".more");
    if (more) {
      this.openMenu(row.dataset.id, more);
    } else if (event.target.closest("a") && !(event.ctrlKey || event.metaKey || event.shiftKey || event.button)) {
      event.preventDefault();
      this.show(false);
      this.hooks.open(row.dataset.id);
    }
  }

  openMenu(id, button) {
    const item = this.items.find((each) => each.id === id);
    if (!item) return;
    this.menuFor = item;
    const menu = $("row-menu");
    menu.querySelector("[data-act=pin]").textContent = item.pinned ? "Unpin" : "Pin";
    for (const kind of ["md", "json"]) {
      menu.querySelector(`[data-act=${kind}]`).href = `/chat/conversations/${id}/export.${kind}`;
    }
    place(menu, button);
  }

  async chosen(event) {
    const act = event.target.closest("[data-act]")?.dataset.act;
    const item = this.menuFor;
    if (!act || !item) return;
    $("row-menu").hidePopover();
    if (act === "pin") await this.change(item, { pinned: !item.pinned });
    else if (act === "rename") await this.rename(item);
    else if (act === "delete") await this.remove(item);
  }

  async rename(item) {
    $("rename-input").value = item.title;
    if ((await this.ask("rename")) !== "ok") return;
    const title = $("rename-input").value.trim();
    if (title) await this.change(item, { title });
  }

  async ask(id) {
    const said = await ask($(id));
    this.back();
    return said;
  }

  /** To the row that the menu was of, where the button that opened it has been drawn anew meanwhile. */
  back() {
    if (!this.menuFor || document.activeElement !== document.body) return;
    ($("list").querySelector(`[data-id="${this.menuFor.id}"] .more`) ?? $("list")).focus();
  }

  async change(item, changes) {
    try {
      const { conversation } = await call("PATCH", `conversations/${item.id}`, changes);
      this.put(conversation);
      this.hooks.changed(conversation);
    } catch (error) {
      announce(error.message);
    }
  }

  async remove(item) {
    $("confirm-name").textContent = item.title;
    if ((await this.ask("confirm")) !== "ok") return;
    try {
      await call("DELETE", `conversations/${item.id}`);
    } catch (error) {
      if (error.status !== 404) return announce(error.message);
    }
    this.changes += 1;
    this.items = this.items.filter((each) => each.id !== item.id);
    this.draw();
    this.hooks.deleted(item.id);
  }

  search() {
    this.query = $("search").value.trim();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh().catch((error) => announce(error.message)), 150);
  }

  focusSearch() {
    if (getComputedStyle($("open-sidebar")).display !== "none") this.show(true);
    $("search").focus();
    $("search").select();
  }

  searchKey(event) {
    if (event.isComposing) return;
    if (event.key === "Escape" && $("search").value) {
      event.stopPropagation();
      $("search").value = "";
      this.search();
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      $("list").querySelector("a")?.focus();
    } else if (event.key === "Enter") {
      this.openFirst().catch((error) => announce(error.message));
    }
  }

  /** Open the first of those that are found for what is written now; the list may lag behind. */
  async openFirst() {
    const query = this.query;
    clearTimeout(this.timer);
    await this.refresh();
    if (query !== this.query || !this.items.length) return;
    this.show(false);
    this.hooks.open(this.items[0].id);
  }
}

/** Up and down walk through a menu. */
function arrows(event) {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  event.preventDefault();
  const items = [...event.currentTarget.querySelectorAll("a, button")];
  const step = event.key === "ArrowDown" ? 1 : -1;
  items.at((items.indexOf(document.activeElement) + step + items.length) % items.length)?.focus();
}

function note(text) {
  const element = document.createElement("p");
  element.className = "list-empty";
  element.textContent = text;
  return element;
}

/** Pinned ones first, then by age. */
function sections(items, searching) {
  if (searching) return items.length ? [["Found", items]] : [];
  const day = 86400000;
  const midnight = new Date().setHours(0, 0, 0, 0);
  const named = new Map();
  const name = (item) => {
    if (item.pinned) return "Pinned";
    const time = Date.parse(item.updated_at);
    if (time >= midnight) return "Today";
    if (time >= midnight - day) return "Yesterday";
    return time >= midnight - 7 * day ? "Last seven days" : "Earlier";
  };
  for (const item of items) {
    const key = name(item);
    if (!named.has(key)) named.set(key, []);
    named.get(key).push(item);
  }
  return [...named];
}
