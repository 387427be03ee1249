/** Small helpers around the DOM. */

export const $ = (id) => document.getElementById(id);

/** A copy of a template's first element. */
export function stamp(id) {
  return $(id).content.firstElementChild.cloneNode(true);
}

let announced;
/** Say something to screen readers: states only, never the tokens of an answer. */
export function announce(text) {
  const region = $("announce");
  region.textContent = "";
  clearTimeout(announced);
  announced = setTimeout(() => (region.textContent = text), 60);
}

/** Copy, and show on the button that it worked. */
export async function copyText(text, button) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copyByHand(text);
  } catch {
    copyByHand(text);
  }
  announce("Copied");
  if (button.dataset.was !== undefined) return;
  button.dataset.was = button.getAttribute("aria-label") ?? "";
  const label = button.childElementCount ? null : button.textContent;
  if (label !== null) button.textContent = "Copied";
  else button.classList.add("done");
  setTimeout(() => {
    if (label !== null) button.textContent = label;
    button.classList.remove("done");
    delete button.dataset.was;
  }, 1200);
}

/** The clipboard interface is missing on pages that are neither HTTPS nor localhost. */
function copyByHand(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Open a dialog; resolves with its return value once it is closed. */
export function ask(dialog) {
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }),
  );
}

/** Put a popover beside the button that opened it, inside the window. */
export function place(menu, button) {
  const box = button.getBoundingClientRect();
  menu.showPopover();
  const { width, height } = menu.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.right - width, innerWidth - width - 8));
  const below = box.bottom + 4 + height <= innerHeight - 8;
  menu.style.left = `${left}px`;
  menu.style.top = `${below ? box.bottom + 4 : Math.max(8, box.top - 4 - height)}px`;
  menu.querySelector("a, button")?.focus();
}
