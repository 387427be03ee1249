/** The page's JSON calls. */

/** By this name the server knows the page, and does not tell it what it has changed itself. */
export const page = { id: "" };

export class ApiError extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

const token = () => document.querySelector("input[name=csrfmiddlewaretoken]").value;

export async function call(method, path, body) {
  let response;
  try {
    response = await fetch(`/chat/${path}`, {
      method,
      headers: { "Content-Type": "application/json", "X-CSRFToken": token(), "X-Chat-Page": page.id },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
    });
  } catch {
    throw new ApiError("The server cannot be reached.", "offline", 0);
  }
  if (response.status === 401) {
    location.reload(); // the sign-in page leads back here
  }
  let data = null;
  try {
    data = await response.json();
  } catch {
    // An error page of a proxy; the status says enough.
  }
  if (!response.ok) {
    const error = data?.error ?? {};
    throw new ApiError(error.message ?? `The server answered ${response.status}.`, error.code ?? "http", response.status);
  }
  return data;
}
