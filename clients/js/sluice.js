/**
 * The reference client of Sluice's WebSocket protocol (`sluice.v1`), as one ES module without
 * dependencies. It speaks to `/ws/v1/stream`, and to the chat page's `/ws/chat`.
 *
 *   const client = new SluiceClient("/ws/v1/stream");
 *   const stream = client.generate({ model: "...", messages: [{ role: "user", content: "Hi" }] });
 *   for await (const event of stream) {
 *     if (event.type === "delta") show(event.text);
 *   }
 *
 * One socket carries any number of streams. When it breaks, the client connects again with
 * growing pauses and takes every stream up where it was: by `attach` with the last sequence
 * number where the server has accepted it, else by sending the same request again under the
 * same reference.
 */

/** Pauses between attempts to connect, milliseconds; the last one repeats. */
const BACKOFF = [0, 250, 500, 1000, 2000, 4000];
/** A socket that is silent this long is asked for a sign of life, and given up if none comes. */
const PING_AFTER = 15000;
const PONG_WITHIN = 8000;
/** Closing codes after which connecting again cannot help. */
const FINAL_CODES = new Set([4401, 4403, 4404]);
/** The closing code of a message that was too big: it would be so again. */
const TOO_BIG = 1009;

/** A reference that no other stream of this user has. */
export function newRef() {
  if (globalThis.crypto?.randomUUID) return crypto.randomUUID();
  // randomUUID is missing on pages that were not loaded over HTTPS or from localhost.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** One generation. Iterate over it, or give handlers; both see every event in order. */
export class SluiceStream {
  /** @param {SluiceClient} client @param {object} request what (re-)starts it @param {object} handlers by event type */
  constructor(client, request, handlers = {}) {
    this.client = client;
    this.id = request.id;
    this.request = request;
    this.handlers = handlers;
    /** Set once the server has accepted the request. */
    this.requestId = request.request_id ?? null;
    this.accepted = false;
    /** Sequence number of the last event that carried one. */
    this.seq = request.after ?? 0;
    this.ended = false;
    /** The message that asks to stop, once that was wanted. */
    this.cancelling = null;
    this.events = [];
    this.waiting = null;
    this.iterated = false;
  }

  /** Ask the server to stop, on every new socket again; the stream still ends with its own last event. */
  cancel(extra = {}) {
    if (this.ended) return;
    this.cancelling = { type: "cancel", id: this.id, ...extra };
    if (this.client.state === "open") this.client.transmit(this.cancelling);
  }

  /** What to send on a new socket. */
  resume() {
    if (this.request.resume) return this.request.resume(this);
    if (this.requestId) return { type: "attach", id: this.id, request_id: this.requestId, after: this.seq };
    return this.request;
  }

  take(event) {
    if (event.type === "accepted") {
      this.accepted = true;
      this.requestId = event.request_id ?? this.requestId;
    }
    if (typeof event.seq === "number") {
      // After an attach the server may repeat what is here already.
      if (event.type === "delta" && event.seq <= this.seq) return;
      this.seq = event.seq;
    }
    if (event.type === "detached" || (event.type === "error" && event.error?.code === "detached")) {
      // The server lets go while the generation goes on: take it up again, there or elsewhere.
      const socket = this.client.socket;
      setTimeout(() => {
        // A new socket has taken up every stream already.
        if (this.client.socket === socket) this.client.takeUp(this);
      }, 400);
      return;
    }
    if (event.type === "done" || event.type === "error") this.end();
    this.handlers[event.type]?.(event, this);
    if (this.iterated || !Object.keys(this.handlers).length) {
      this.events.push(event);
      this.waiting?.();
    }
  }

  end() {
    this.ended = true;
    this.client.streams.delete(this.id);
    this.waiting?.();
  }

  async *[Symbol.asyncIterator]() {
    this.iterated = true;
    while (true) {
      while (this.events.length) yield this.events.shift();
      if (this.ended) return;
      await new Promise((resolve) => (this.waiting = resolve));
      this.waiting = null;
    }
  }
}

/**
 * A socket that comes back.
 *
 * Events: `state` (detail: "connecting" | "open" | "waiting" | "closed"), and `message` for
 * every message that belongs to no stream.
 */
export class SluiceClient extends EventTarget {
  /**
   * @param {string} url path or ws(s):// URL
   * @param {{protocols?: string[], ticket?: () => Promise<string>}} options `ticket` fetches a
   *   single-use ticket for each connection, for pages of another origin
   */
  constructor(url, options = {}) {
    super();
    this.url = new URL(url, location.href);
    this.url.protocol = this.url.protocol.replace(/^http/, "ws");
    this.options = options;
    this.streams = new Map();
    this.socket = null;
    this.state = "closed";
    this.attempt = 0;
    this.wanted = false;
    this.timer = null;
    this.outbox = [];
    this.heardAt = 0;
    this.watchdog = null;
    globalThis.addEventListener?.("online", () => this.hurry());
  }

  connect() {
    this.wanted = true;
    if (!this.socket && !this.timer && this.state !== "connecting") this.open();
  }

  /** Close for good. 4001 tells the server that the page goes, so that it need not wait for it. */
  close(code = 1000) {
    this.wanted = false;
    clearTimeout(this.timer);
    this.timer = null;
    const socket = this.socket;
    this.drop();
    socket?.close(code);
    this.become("closed");
  }

  /** Start a generation. `request` is the message without type and id. */
  generate(request, handlers) {
    return this.start({ type: "generate", id: newRef(), ...request }, handlers);
  }

  /** Take up a generation that is under way. */
  attach(request, handlers) {
    return this.start({ type: "attach", id: newRef(), ...request }, handlers);
  }

  start(request, handlers) {
    const stream = new SluiceStream(this, request, handlers);
    this.streams.set(stream.id, stream);
    this.connect();
    if (this.state === "open") this.takeUp(stream);
    return stream;
  }

  /** Send now, or as soon as there is a connection. */
  send(message) {
    if (this.state === "open") this.transmit(message);
    else this.outbox.push(message);
  }

  // --- below: the connection ---------------------------------------------------------------

  async open() {
    this.timer = null;
    this.become("connecting");
    const protocols = this.options.protocols ?? ["sluice.v1"];
    let socket;
    try {
      const ticket = this.options.ticket && (await this.options.ticket());
      if (!this.wanted) return; // closed meanwhile
      socket = new WebSocket(this.url, ticket ? [...protocols, `sluice.ticket.${ticket}`] : protocols);
    } catch {
      if (this.wanted) this.again();
      return;
    }
    this.socket = socket;
    socket.onopen = () => this.opened();
    socket.onmessage = (event) => this.received(event.data);
    socket.onclose = (event) => this.closed(socket, event.code);
  }

  opened() {
    this.attempt = 0;
    this.heardAt = Date.now();
    this.watchdog = setInterval(() => this.watch(), 2000);
    this.become("open");
    for (const stream of [...this.streams.values()]) this.takeUp(stream);
    for (const message of this.outbox.splice(0)) this.transmit(message);
  }

  takeUp(stream) {
    this.transmit(stream.resume());
    this.transmit(stream.cancelling);
  }

  received(data) {
    this.heardAt = Date.now();
    let message;
    try {
      message = JSON.parse(data);
    } catch {
      return;
    }
    const stream = this.streams.get(message.id);
    if (stream) stream.take(message);
    else if (message.type !== "pong") this.dispatchEvent(new CustomEvent("message", { detail: message }));
  }

  closed(socket, code) {
    if (socket !== this.socket) return;
    this.drop();
    if (FINAL_CODES.has(code)) {
      this.wanted = false;
      this.become("closed");
      this.dispatchEvent(new CustomEvent("refused", { detail: { code } }));
    } else if (this.wanted) {
      if (code === TOO_BIG) this.refuse();
      this.again();
    } else {
      this.become("closed");
    }
  }

  /** End the streams whose request the server has not taken. */
  refuse() {
    const error = { code: "message_too_big", message: "This is more than the server takes in one message." };
    for (const stream of [...this.streams.values()]) {
      if (!stream.accepted && stream.request.type === "generate") stream.take({ type: "error", id: stream.id, error });
    }
  }

  again() {
    const pause = BACKOFF[Math.min(this.attempt, BACKOFF.length - 1)];
    this.attempt += 1;
    this.become("waiting");
    // Spread out: after a server's restart all pages come back at once.
    this.timer = setTimeout(() => this.open(), pause * (0.75 + Math.random() / 2));
  }

  hurry() {
    if (this.wanted && this.timer) {
      clearTimeout(this.timer);
      this.open();
    }
  }

  watch() {
    const silent = Date.now() - this.heardAt;
    if (silent > PING_AFTER + PONG_WITHIN) {
      const socket = this.socket;
      this.closed(socket, 4000);
      socket?.close();
    } else if (silent > PING_AFTER) {
      this.transmit({ type: "ping" });
    }
  }

  transmit(message) {
    if (message && this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  drop() {
    clearInterval(this.watchdog);
    this.watchdog = null;
    this.socket = null;
  }

  become(state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
