/** The messages of the shown branch, and the scrolling of the thread. */

import { applyContent, codeText } from "./content.js";
import { $, copyText, stamp } from "./dom.js";

const NEAR_END = 48;

/** One message on the page. `data` is the message as the server told it last. */
export class MessageView {
  constructor(data, actions) {
    this.actions = actions;
    this.answer = data.role === "assistant";
    this.element = stamp(this.answer ? "t-answer" : "t-user");
    this.content = this.element.querySelector(this.answer ? ".content" : ".bubble");
    this.element.addEventListener("click", (event) => this.clicked(event));
    this.update(data);
  }

  update(data) {
    this.data = data;
    this.element.dataset.id = data.id ?? "";
    this.branches();
    if (!this.answer) {
      this.content.textContent = data.text;
      return;
    }
    this.element.querySelector("h2").textContent = `Answer${data.model ? ` of ${data.model}` : ""}`;
    if (data.content) applyContent(this.content, data.content);
    this.element.classList.toggle("live", data.state === "streaming");
    this.element.classList.toggle("failed", data.state === "failed");
    if (data.state === "streaming") {
      this.wait(this.content.childElementCount ? null : "");
      this.element.querySelector(".notice").hidden = true;
      this.element.querySelector(".stats").textContent = "";
    } else {
      this.wait(null);
      this.notice();
      this.element.querySelector(".stats").textContent = statsText(data.stats);
      this.element.querySelector(".stats").title = statsTitle(data.stats);
    }
  }

  /** Text beside the dots while nothing has come yet; `null` hides both. */
  wait(text) {
    const waiting = this.element.querySelector(".waiting");
    waiting.hidden = text === null;
    waiting.querySelector(".waiting-text").textContent = text ?? "";
  }

  render(event) {
    this.wait(null);
    applyContent(this.content, event.content);
    if (event.tokens_per_second) {
      this.element.querySelector(".stats").textContent = `${event.tokens_per_second.toFixed(1)} tokens/s`;
    }
  }

  notice() {
    const { data } = this;
    const box = this.element.querySelector(".notice");
    const text = noticeText(data);
    box.hidden = !text;
    box.querySelector(".notice-text").textContent = text;
    box.querySelector("[data-act=continue]").hidden = !(data.cut && data.text && data.id);
    box.querySelector("[data-act=retry]").hidden = data.state !== "failed" && data.text !== "";
  }

  /** Versions of this message, which may become more while it is shown. */
  setSiblings(siblings) {
    this.data = { ...this.data, siblings };
    this.branches();
  }

  branches() {
    const box = this.element.querySelector(".branches");
    const siblings = this.data.siblings ?? [];
    const at = siblings.indexOf(this.data.id);
    box.hidden = siblings.length < 2 || at < 0;
    if (box.hidden) return;
    box.querySelector(".count").textContent = `${at + 1}/${siblings.length}`;
    box.querySelector("[data-act=previous]").disabled = at === 0;
    box.querySelector("[data-act=next]").disabled = at === siblings.length - 1;
  }

  clicked(event) {
    const button = event.target.closest("[data-act]");
    if (!button) return;
    const act = button.dataset.act;
    const { data } = this;
    if (act === "copy") copyText(data.text, button);
    else if (act === "copy-code") copyText(codeText(button.closest(".codeblock").querySelector("code")), button);
    else if (act === "previous" || act === "next") {
      const siblings = data.siblings ?? [];
      const other = siblings[siblings.indexOf(data.id) + (act === "next" ? 1 : -1)];
      if (other) this.actions.branch(other);
    } else if (act === "edit") this.edit();
    else if (act === "cancel-edit") this.endEdit();
    else this.actions[act]?.(this);
  }

  // --- editing a message of one's own ------------------------------------------------------

  edit() {
    if (this.editor || this.answer) return;
    this.opener = document.activeElement;
    const form = (this.editor = stamp("t-edit"));
    const area = form.querySelector("textarea");
    area.id = `edit-${this.data.id}`;
    form.querySelector("label").htmlFor = area.id;
    area.value = this.data.text;
    this.content.hidden = true;
    this.element.querySelector(".actions").hidden = true;
    this.content.after(form);
    const send = () => {
      const text = area.value;
      if (!text.trim()) return;
      this.endEdit($("input"));
      this.actions.edited(this, text);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    area.addEventListener("keydown", (event) => {
      if (event.isComposing || event.keyCode === 229) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      }
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      event.stopPropagation();
      this.endEdit();
    });
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  /** Show the message again; the focus goes where it came from, or to `next`. */
  endEdit(next = this.opener) {
    this.editor?.remove();
    this.editor = null;
    this.content.hidden = false;
    this.element.querySelector(".actions").hidden = false;
    next?.focus();
    this.actions.closed();
  }
}

function noticeText(data) {
  if (data.state === "failed") return data.error || "The answer failed.";
  if (data.state === "stopped") {
    if (data.reason === "left") return "Stopped, because the page was closed.";
    return "Stopped.";
  }
  if (data.reason === "length") return "Cut off: the longest answer was reached.";
  return "";
}

function statsText(stats) {
  if (!stats?.generated_tokens) return "";
  const parts = [];
  if (stats.tokens_per_second) parts.push(`${stats.tokens_per_second.toFixed(1)} tokens/s`);
  if (stats.ttft_ms !== null) parts.push(`first after ${seconds(stats.ttft_ms)}`);
  return parts.join(" · ");
}

function statsTitle(stats) {
  return stats?.generated_tokens ? `${stats.generated_tokens} tokens, ${stats.prompt_tokens} in the prompt` : "";
}

const seconds = (ms) => (ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(1)} s`);

/** Keeps the end in view while it is in view, and lets go as soon as the reader scrolls up. */
export class Scroller {
  constructor() {
    this.element = $("thread");
    this.button = $("to-end");
    this.stick = true;
    /** Where the thread was left by this object, or seen by it, last. */
    this.at = 0;
    this.element.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.button.addEventListener("click", () => this.toEnd(true));
  }

  get atEnd() {
    const { scrollTop, clientHeight, scrollHeight } = this.element;
    return scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  scrolled() {
    this.at = this.element.scrollTop;
    this.stick = this.atEnd;
    this.button.hidden = this.stick;
    $("main").classList.toggle("scrolled", this.element.scrollTop > 4);
  }

  /** After something has grown. */
  follow() {
    // A reader may have scrolled up, and the browser not have said so yet.
    if (this.element.scrollTop < this.at - 1 && !this.atEnd) this.stick = false;
    if (this.stick) this.element.scrollTop = this.element.scrollHeight;
    else this.button.hidden = false;
    this.at = this.element.scrollTop;
  }

  toEnd(smooth = false) {
    this.stick = true;
    this.button.hidden = true;
    const behavior = smooth && !matchMedia("(prefers-reduced-motion: reduce)").matches ? "smooth" : "instant";
    this.element.scrollTo({ top: this.element.scrollHeight, behavior });
    this.at = this.element.scrollTop;
  }
}
