/**
 * Shows an answer out of the operations that the server sends (see apps/chat/live.py). All HTML
 * here was rendered and sanitized by the server; text from anywhere else goes in as text.
 */

import { stamp } from "./dom.js";

/** Apply `{count, ops}` to a content element. */
export function applyContent(element, content) {
  if (!content) return;
  for (const op of content.ops) {
    const [kind, index] = op;
    while (element.childElementCount <= index) {
      const block = document.createElement("div");
      block.className = "block";
      block.dir = "auto";
      element.append(block);
    }
    const block = element.children[index];
    if (kind === "code") setCode(block, op[2], op[3], op[4]);
    else setHtml(block, op[2]);
  }
  while (element.childElementCount > content.count) element.lastElementChild.remove();
}

function setHtml(block, html) {
  if (block.dataset.kind !== "html") block.replaceChildren();
  block.dataset.kind = "html";
  const template = document.createElement("template");
  template.innerHTML = html;
  patch(block, template.content);
}

/** Make `target`'s children those of `source`, leaving alone what is equal from the start on. */
function patch(target, source) {
  let at = target.firstChild;
  let next = source.firstChild;
  while (at && next && at.isEqualNode(next)) {
    at = at.nextSibling;
    next = next.nextSibling;
  }
  if (at && next && at.nodeName === next.nodeName && next.firstChild && sameAttributes(at, next)) {
    // What grows is the inside of the last one.
    const tail = next.nextSibling;
    patch(at, next);
    at = at.nextSibling;
    next = tail;
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
  while (next) {
    const moved = next;
    next = next.nextSibling;
    target.append(moved);
  }
}

function sameAttributes(a, b) {
  if (!a.attributes) return true;
  return a.attributes.length === b.attributes.length && [...b.attributes].every((x) => a.getAttribute(x.name) === x.value);
}

function setCode(block, lang, start, lines) {
  if (block.dataset.kind !== "code") {
    block.replaceChildren(stamp("t-code"));
    block.dataset.kind = "code";
  }
  block.querySelector(".lang").textContent = lang || "text";
  block.querySelector("pre").setAttribute("aria-label", lang ? `Code, ${lang}` : "Code");
  const code = block.querySelector("code");
  // Each line is a span of its own, laid out as a block: what is there already costs nothing.
  // An empty one holds a line break, or it would be lost where text is selected and copied.
  while (code.childElementCount > start) code.lastElementChild.remove();
  const template = document.createElement("template");
  template.innerHTML = lines.map((line) => `<span class="line">${line || "\n"}</span>`).join("");
  code.append(template.content);
}

/** The text of a code element. */
export function codeText(code) {
  return Array.from(code.children, (line) => line.textContent.replace("\n", "")).join("\n") + "\n";
}
