// Requests to this server. The key is kept in this tab only.
const KEY = "sensorium.key";

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Send a request and return its response. `body`: an object (sent as JSON), a FormData, or nothing for GET. */
export async function send(path, body, signal) {
  const headers = getKey() ? { Authorization: `Bearer ${getKey()}` } : {};
  const isForm = body instanceof FormData;
  if (body && !isForm) headers["Content-Type"] = "application/json";
  const content = body && !isForm ? JSON.stringify(body) : body;
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: content, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  throw new ApiError(found?.error?.message ?? `The server answered with the status ${response.status}.`, response.status);
}

export const sendJson = async (path, body, signal) => (await send(path, body, signal)).json();

/** Yield the objects of a stream of server-sent events. */
export async function* events(response) {
  let text = "";
  for await (const block of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    const parts = (text + block).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message);
      yield event;
    }
  }
  throw new ApiError("The connection was lost before the answer ended.");
}

async function* chunks(stream) {
  const reader = stream.getReader(); // not every browser iterates over streams
  try {
    for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
