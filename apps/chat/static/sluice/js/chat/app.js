/** The chat page: what is shown, and what happens on which event. */

import { SluiceClient } from "../../client/sluice.js";
import { call, page } from "./api.js";
import { Composer } from "./composer.js";
import { $, announce } from "./dom.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { MessageView, Scroller } from "./thread.js";

const boot = JSON.parse($("boot").textContent);
const client = new SluiceClient("/ws/chat");
const scroller = new Scroller();
/** Pause before an answer that the server cannot show now is asked for again, milliseconds. */
const ATTACH_AGAIN = 2000;
/** Whoever was away for less than this, milliseconds, has hardly changed anything elsewhere. */
const SHORT_ABSENCE = 1000;

/** The shown conversation; `null` for one that has no message yet. */
let conversation = null;
/** Views of the shown branch, first message first. */
let views = [];
/** Grows with every switch, so that a late reply for the conversation before is dropped. */
let visit = 0;
/** Grows with every look at the shown conversation and every turn, so that a late look is dropped. */
let looks = 0;
/** Whether there is something that could not be looked at yet, or was dropped. */
let stale = false;
/** Whether what the page before this one sent may come just now. */
let unsure = false;
/** Answers being written, shown or not: answer id -> {stream, view, conversation}. */
const live = new Map();
/** Those that the server has not accepted yet. */
const pending = new Set();

const sidebar = new Sidebar({
  open: (id) => open(id),
  fresh: () => fresh(),
  busy: (id) => [...live.values()].some((entry) => entry.conversation === id),
  changed(changed) {
    if (changed.id === conversation?.id) setConversation(changed);
  },
  deleted(id) {
    forget(id);
    announce("Conversation deleted");
  },
});

const settings = new Settings(boot.presets, {
  changed(values) {
    if (!conversation) return;
    call("PATCH", `conversations/${conversation.id}`, { settings: values })
      .then((detail) => {
        if (detail.conversation.id === conversation?.id) conversation = detail.conversation;
      })
      .catch((error) => announce(error.message));
  },
});

const composer = new Composer({ send, stop, editLast });

const actions = {
  branch: (id) => showBranch(id),
  edited: (view, text) => edit(view, text),
  closed: () => catchUp(),
  regenerate: (view) => regenerate(view),
  retry: (view) => (view.resend ? view.resend() : regenerate(view)),
  continue: (view) => continueAnswer(view),
};

// --- what is shown ---------------------------------------------------------------------------

function setConversation(next) {
  conversation = next;
  const title = next?.title ?? "New chat";
  $("title").textContent = title;
  document.title = `${title} · Sluice`;
  sidebar.select(next?.id ?? null);
}

/** Show a conversation out of the server's detail. */
function show(detail) {
  stale = false;
  setConversation(detail.conversation);
  settings.show(detail.conversation.settings);
  views = detail.messages.map((data) => {
    const entry = live.get(data.id);
    if (entry) {
      entry.view.setSiblings(data.siblings);
      return entry.view;
    }
    const view = new MessageView(data, actions);
    if (data.state === "streaming") follow(view);
    return view;
  });
  draw();
}

function draw() {
  keepFocus(() => $("messages").replaceChildren(...views.map((view) => view.element)));
  $("empty").hidden = views.length > 0;
  answeringChanged();
}

/** Change the thread; the focus, if it was in there, goes on to the same control of the same place. */
function keepFocus(change) {
  const held = document.activeElement;
  const at = [...$("messages").children].indexOf(held?.closest(".message"));
  change();
  if (at < 0) return;
  const message = $("messages").children[at];
  const { act } = held.dataset;
  const turned = { previous: "next", next: "previous" }[act]; // at its end an arrow can not be pressed
  const alike = [act, turned].map((name) => name && message?.querySelector(`[data-act=${name}]`));
  const next = [held, ...alike, $("thread")].find((each) => each?.checkVisibility() && !each.disabled);
  if (next !== document.activeElement) next.focus({ preventScroll: true });
}

function fresh(push = true) {
  visit += 1;
  stale = false;
  setConversation(null);
  settings.show({});
  views = [];
  draw();
  composer.draft("new");
  bringBack();
  if (push && location.pathname !== "/") history.pushState(null, "", "/");
  sidebar.show(false);
  $("input").focus();
}

async function open(id, push = true) {
  const mine = (visit += 1);
  let detail;
  try {
    detail = await call("GET", `conversations/${id}`);
  } catch (error) {
    if (mine !== visit) return;
    if (error.status === 404) {
      fresh();
      sidebar.refresh().catch(() => {});
    }
    banner(error.message);
    return;
  }
  if (mine !== visit) return;
  if (push && location.pathname !== `/c/${id}/`) history.pushState(null, "", `/c/${id}/`);
  if (client.state === "open") banner("");
  show(detail);
  composer.draft(id);
  bringBack();
  scroller.toEnd();
  if (matchMedia("(pointer: fine)").matches) $("input").focus();
}

/** Whether something is shown that only this page has: an open editor, a message the server has not taken. */
const unsaved = () => views.some((view) => view.editor || !view.data.id);

/** Look again, after something else may have changed it; leaves alone what only this page has. */
async function refresh() {
  if (!conversation) return;
  stale = true;
  if (unsaved()) return;
  const here = visit;
  const mine = (looks += 1);
  try {
    const detail = await call("GET", `conversations/${conversation.id}`);
    if (here !== visit || mine !== looks || unsaved()) return;
    show(detail);
    scroller.follow();
  } catch (error) {
    if (error.status === 404 && here === visit && mine === looks) deletedElsewhere();
  }
}

/** At the list, too. */
function lookAgain() {
  sidebar.refresh().catch(() => {});
  refresh();
}

/** Look where that had to wait. */
function catchUp() {
  if (stale) refresh();
}

async function showBranch(id) {
  const here = visit;
  const mine = (looks += 1);
  try {
    const detail = await call("PATCH", `conversations/${conversation.id}`, { leaf: id });
    if (here !== visit) return;
    if (mine === looks && !pending.size) show(detail);
    else refresh();
  } catch (error) {
    announce(error.message);
  }
}

/** A conversation is no more: nothing of it is waited for. */
function forget(id) {
  for (const [answer, entry] of live) if (entry.conversation === id) live.delete(answer);
  if (id === conversation?.id) fresh();
}

/** The shown one, by another page: what is being written here is kept. */
function deletedElsewhere() {
  const written = composer.input.value;
  forget(conversation.id);
  if (!composer.input.value) composer.set(written);
  banner("This conversation was deleted on another page.");
}

/** The answer that is being written at the end of the shown branch. */
function current() {
  const last = views.at(-1);
  return [...pending, ...live.values()].find((entry) => entry.view === last) ?? null;
}

function answeringChanged() {
  composer.setAnswering(current() !== null);
}

/** Half a character, as a cut paste may leave one, is nothing that JSON can carry. */
const wellFormed = (text) => text.toWellFormed?.() ?? text;

// --- turns -----------------------------------------------------------------------------------

function send(text) {
  // What the server never took gives way to what is sent instead.
  views = views.at(-1)?.before ?? views;
  const parent = views.at(-1);
  if (parent && (!parent.answer || !parent.data.id)) return false;
  const body = wellFormed(text).replace(/^\n+|\n+$/g, "");
  const question = new MessageView({ role: "user", text: body }, actions);
  const answer = blank((changed = body) => send(changed));
  views = [...views, question, answer];
  draw();
  scroller.toEnd();
  const request = { op: "send", text: body, conversation: conversation?.id ?? null, parent: parent?.data.id ?? null };
  if (!conversation) request.settings = settings.forNew();
  start(request, answer, question);
  return true;
}

function edit(view, written) {
  const text = wellFormed(written);
  const at = views.indexOf(view);
  if (at < 0) return;
  if (!view.data.id) {
    if (!current()) views.at(-1).resend?.(text);
    return;
  }
  const question = new MessageView({ ...view.data, id: null, text, siblings: [] }, actions);
  const answer = blank((changed = text) => edit(view, changed));
  views = [...views.slice(0, at), question, answer];
  draw();
  scroller.toEnd();
  start({ op: "edit", message: view.data.id, text }, answer, question);
}

function regenerate(view) {
  const at = views.indexOf(view);
  if (!view.data.id || at < 0) return;
  const answer = blank(() => regenerate(view));
  views = [...views.slice(0, at), answer];
  draw();
  start({ op: "regenerate", message: view.data.id }, answer);
}

function continueAnswer(view) {
  keepFocus(() => view.update({ ...view.data, state: "streaming", cut: false, content: null }));
  start({ op: "continue", message: view.data.id }, view);
}

/**
 * An answer that the server does not know yet. Until it does, `before` is what was shown before this
 * turn, and `resend` starts the turn anew from there.
 */
function blank(again) {
  const answer = new MessageView({ role: "assistant", text: "", state: "streaming", model: $("model").value }, actions);
  const before = (answer.before = views);
  answer.resend = (...changed) => {
    views = before;
    again(...changed);
  };
  return answer;
}

/** Send a turn, and show what comes of it. */
function start(request, view, question = null) {
  const entry = { view, question, conversation: conversation?.id ?? null, stream: null };
  looks += 1;
  pending.add(entry);
  const handlers = streamHandlers(entry);
  handlers.accepted = (event) => {
    pending.delete(entry);
    view.before = view.resend = null;
    entry.conversation = event.conversation.id;
    entry.answer = event.answer;
    live.set(event.answer, entry);
    for (const message of event.messages) {
      if (message.role === "user") question?.update(message);
      else view.update(message);
    }
    if (views.includes(view)) {
      if (!conversation) {
        history.replaceState(null, "", `/c/${event.conversation.id}/`);
        composer.key = event.conversation.id;
      }
      setConversation(event.conversation);
      settings.show(event.conversation.settings);
    }
    sidebar.put(event.conversation);
    catchUp();
  };
  const resume = (stream) =>
    entry.answer ? { type: "attach", id: stream.id, message: entry.answer } : stream.request;
  entry.stream = client.generate({ ...request, resume }, handlers);
  if (client.state === "open") banner("");
  answeringChanged();
  announce("Waiting for the answer");
}

/** Watch an answer that is being written already. */
function follow(view) {
  const entry = { view, conversation: view.data.conversation, answer: view.data.id, stream: null };
  live.set(entry.answer, entry);
  attach(entry);
}

function attach(entry) {
  const resume = (stream) => ({ type: "attach", id: stream.id, message: entry.answer });
  entry.stream = client.attach({ message: entry.answer, resume }, streamHandlers(entry));
  if (entry.stopped) cancel(entry);
}

function streamHandlers(entry) {
  const { view } = entry;
  return {
    queued: (event) => view.wait(queueText(event.position)),
    render: (event) => frame(() => view.render(event)),
    done(event) {
      live.delete(entry.answer);
      frame(() => view.update(event.message));
      ended(entry);
      announce(endText(event.message));
    },
    error(event) {
      if (entry.answer && live.get(entry.answer) !== entry) return; // of a conversation that has been deleted
      if (event.error.code === "unavailable" && entry.answer) {
        // It cannot be watched now, but may well be living.
        view.wait("Waiting for the server");
        setTimeout(() => live.get(entry.answer) === entry && attach(entry), ATTACH_AGAIN);
        return;
      }
      // Nothing was stored, or it cannot be watched: the message says so and offers to try again.
      live.delete(entry.answer);
      pending.delete(entry);
      const { message, code } = event.error;
      view.update({ ...view.data, state: "failed", error: message, code, cut: false });
      if (code === "busy" && !entry.answer && !entry.question) {
        // Another page writes there already. Nothing of this turn is worth keeping.
        if (views.includes(view)) views = view.before ?? views;
        draw();
        banner(message);
        stale = true;
      }
      ended(entry);
      announce(message);
      if (code === "not_found") {
        // It was deleted by another page.
        lookAgain();
      }
    },
  };
}

function ended() {
  answeringChanged();
  sidebar.draw();
  scroller.follow();
  catchUp();
}

/** Change the thread, keep its end in view, and note how long that took. */
function frame(change) {
  const begin = performance.now();
  change();
  scroller.follow();
  performance.measure("sluice-frame", { start: begin, end: performance.now() });
}

function stop() {
  const entry = current();
  if (!entry) return;
  // Kept until it ends: it may be that nobody can be told just now.
  entry.stopped = true;
  cancel(entry);
  $("input").focus();
}

function cancel(entry) {
  entry.stream.cancel(entry.answer ? { message: entry.answer } : {});
}

function editLast() {
  if (current()) return false;
  const last = views.findLast((view) => !view.answer);
  last?.edit();
  return Boolean(last);
}

function queueText(position) {
  return position === 0 ? "Next in the queue" : `${position} ahead in the queue`;
}

function endText(message) {
  if (message.state === "complete") return "Answer complete";
  return message.state === "stopped" ? "Answer stopped" : `The answer failed: ${message.error}`;
}

// --- the connection --------------------------------------------------------------------------

function banner(text) {
  $("connection").textContent = text;
  $("connection").hidden = !text;
}

let lost = null;
client.addEventListener("state", ({ detail: state }) => {
  if (state === "open") {
    clearTimeout(lost);
    banner("");
    if (lost !== null) lookAgain();
    lost = null;
  } else if (state === "waiting") {
    lost ??= setTimeout(() => banner("Connection lost. Reconnecting…"), 700);
    // A refused handshake looks like a lost network; the list tells a session that has ended.
    if (client.attempt >= 3) call("GET", "conversations").catch(() => {});
  }
});
client.addEventListener("refused", () => location.reload());
client.addEventListener("message", ({ detail: message }) => {
  if (message.type === "hello") toldFromNow();
  if (message.type === "hello" || message.type === "models") modelsKnown(message);
  else if (message.type === "changed") changedElsewhere(message);
  else if (message.type === "error" && !message.id) banner(message.error.message);
});

/** What came between the making of this page and now was told to nobody. */
function toldFromNow() {
  if (!unsure) return;
  unsure = false;
  refresh().finally(bringBack);
}

let askAgain;
function modelsKnown(message) {
  page.id = message.page ?? page.id;
  settings.setModels(message);
  if (client.state === "open") banner("");
  const ready = message.models.some((model) => model.ready);
  askModels(ready ? 60000 : 3000);
}

function askModels(pause) {
  clearTimeout(askAgain);
  askAgain = setTimeout(() => {
    if (client.state === "open") client.send({ type: "models" });
    askModels(60000); // also where the answer is an error
  }, pause);
}

function changedElsewhere({ conversation: id, answer }) {
  sidebar.refresh().catch(() => {});
  if (id === conversation?.id && !(answer && live.has(answer))) refresh();
}

/** What the server may not have got is a draft for the page after this one, unless it has come. */
function leaveUnsent() {
  for (const { question, conversation: id, stream } of pending) {
    composer.leave(id ?? "new", [{ ref: stream.id, text: question?.data.text }]);
  }
}

function bringBack() {
  composer.bringBack(new Set(views.map((view) => view.data.ref)));
}

// The page goes: say so, since a socket that merely breaks is waited for. It may also come back,
// out of the browser's cache.
addEventListener("pagehide", (event) => {
  if (!event.persisted) leaveUnsent();
  client.close(4001);
});
addEventListener("pageshow", (event) => {
  if (event.persisted) client.connect();
});

// Pages on other servers send no news. What they have changed is seen by whoever comes back.
let leftAt = null;
function left() {
  leftAt ??= Date.now();
}
function cameBack() {
  const away = leftAt === null ? 0 : Date.now() - leftAt;
  leftAt = null;
  if (away > SHORT_ABSENCE) lookAgain();
}
document.addEventListener("visibilitychange", () => (document.hidden ? left() : cameBack()));
addEventListener("blur", left);
addEventListener("focus", cameBack);

// --- keys, links, start ----------------------------------------------------------------------

document.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if ((event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    sidebar.focusSearch();
  } else if (event.key === "Escape" && !event.defaultPrevented) {
    if (document.querySelector("dialog[open], [popover]:popover-open")) return;
    if (sidebar.isOpen) sidebar.show(false);
    else if (current()) stop();
  }
});
document.addEventListener("click", (event) => {
  event.target.closest("[data-close]")?.closest("dialog").close("cancel");
});
addEventListener("popstate", () => {
  // What is open is about the conversation that is left.
  for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close("cancel");
  const id = location.pathname.match(/^\/c\/([0-9a-f-]+)\/$/)?.[1];
  if (id) open(id, false);
  else fresh(false);
});
$("starters").addEventListener("click", (event) => {
  const text = event.target.closest(".starter")?.textContent;
  if (text) composer.set(text);
  $("input").focus();
});

sidebar.set(boot.list);
if (boot.detail) {
  show(boot.detail);
  composer.draft(boot.detail.conversation.id);
  unsure = composer.sent(composer.key).length > 0;
  scroller.toEnd();
} else {
  fresh(false);
}
client.connect();
document.documentElement.dataset.ready = "";
