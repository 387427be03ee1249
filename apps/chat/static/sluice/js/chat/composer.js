/** The field that messages are written in. */

import { $ } from "./dom.js";

export class Composer {
  /** @param {object} hooks `send(text)` gives false to keep the text, `stop()`, `editLast()` */
  constructor(hooks) {
    this.hooks = hooks;
    this.input = $("input");
    this.answering = false;
    this.key = "";
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", (event) => {
      // The second click of a double click on Send lands on the Stop that has taken its place.
      if (event.detail < 2) hooks.stop();
    });
    this.input.addEventListener("keydown", (event) => this.pressed(event));
    this.input.addEventListener("input", () => this.changed());
    this.changed();
  }

  pressed(event) {
    // While an input method composes, Enter and the arrows belong to it. Safari ends the
    // composition before the key arrives, and then marks it with the code 229 only.
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.altKey && !event.metaKey) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !this.input.value && !event.shiftKey) {
      if (this.hooks.editLast()) event.preventDefault();
    }
  }

  send() {
    const text = this.input.value;
    if (!text.trim() || this.answering) return;
    if (this.hooks.send(text) === false) return;
    this.set("");
  }

  set(text) {
    this.input.value = text;
    this.changed();
  }

  changed() {
    this.grow();
    this.buttons();
    try {
      if (this.input.value) sessionStorage.setItem(`sluice-draft-${this.key}`, this.input.value);
      else sessionStorage.removeItem(`sluice-draft-${this.key}`);
    } catch {
      // Drafts are a courtesy.
    }
  }

  /** Switch to another conversation's draft. */
  draft(key) {
    this.key = key;
    let text = "";
    try {
      text = sessionStorage.getItem(`sluice-draft-${key}`) ?? "";
    } catch {
      // As above.
    }
    this.set(text);
  }

  /** Leave the page after this one what was sent to this conversation, maybe in vain. */
  leave(key, turns) {
    try {
      sessionStorage.setItem(`sluice-sent-${key}`, JSON.stringify([...this.sent(key), ...turns]));
    } catch {
      // As above.
    }
  }

  /** What a page before this one has left. */
  sent(key) {
    try {
      return JSON.parse(sessionStorage.getItem(`sluice-sent-${key}`)) ?? [];
    } catch {
      return [];
    }
  }

  /** Of that, what has not come becomes a draft, before what is written already. */
  bringBack(came) {
    const texts = this.sent(this.key).flatMap(({ ref, text }) => (came.has(ref) ? [] : [text]));
    if (texts.some(Boolean)) this.set([...texts, this.input.value].filter(Boolean).join("\n\n"));
    try {
      sessionStorage.removeItem(`sluice-sent-${this.key}`);
    } catch {
      // As above.
    }
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }

  /** While an answer is being written, Send gives its place to Stop. */
  setAnswering(answering) {
    if (answering === this.answering) return;
    const held = document.activeElement === $("send") || document.activeElement === $("stop");
    this.answering = answering;
    this.buttons();
    if (held) this.input.focus();
  }

  buttons() {
    $("stop").hidden = !this.answering;
    $("send").hidden = this.answering;
    $("send").disabled = !this.input.value.trim();
  }
}
