// Requests to the server that this page came from. Addresses are relative, so that a proxy may add a prefix.

import { getKey } from "./key.js";

export const BASE = new URL(".", location.href).href;

// An answer that is no success, or no answer. `status` is 0 if the server could not be reached.
export class ApiError extends Error {
  constructor(status, { message, param, code } = {}, retryAfter = "") {
    super(message || `The server answered ${status}.`);
    this.status = status;
    this.param = param || "";
    this.code = code || "";
    this.retryAfter = retryAfter;
  }
}

// Sends a request and returns the response. Raises ApiError.
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  let response;
  try {
    response = await fetch(BASE + path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached." });
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new ApiError(response.status, body.error, response.headers.get("retry-after") || "");
}

export async function getJson(path) {
  return (await request(path)).json();
}

// Yields the texts behind `data:` of a stream of server-sent events, until [DONE]. Raises ApiError if the stream ends
// before that.
export async function* streamed(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "The connection broke off." });
    }
    if (read.done) throw new ApiError(0, { message: "The stream ended too soon." });
    const events = (rest + read.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));
      if (!line) continue; // a comment that keeps the connection alive
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      yield data;
      // The server ends a stream that fails with an event that has an error, and nothing after it.
      if (data.startsWith('{"error"')) return;
    }
  }
}
