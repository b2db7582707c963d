// Requests to this server. The key is kept in this tab only.
const KEY = "sensorium.key";

export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export class ApiError extends Error {
  constructor(message, status = 0, item = null) {
    super(message);
    this.status = status;
    this.item = item; // {modality, index} of the item at fault
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
  if (!found?.error?.message) throw new ApiError(`The server answered with the status ${response.status}.`, response.status);
  throw toError(found.error, response.status);
}

/** Return the error of an error object, without the names that the API has for items and fields. */
export function toError({ message, param, modality, index }, status = 0) {
  const names = [/^(image|video|audio) \d+: /, /^file: /, ...(param ? [`${param}: `] : [])];
  const text = names.reduce((rest, name) => rest.replace(name, ""), message);
  return new ApiError(text, status, modality ? { modality, index: index ?? 0 } : null);
}

export const sendJson = async (path, body, signal) => (await send(path, body, signal)).json();

/** Yield the objects of a stream of server-sent events. */
export async function* events(response) {
  let text = "";
  for await (const block of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    text += block;
    if (!block.includes("\n")) continue; // the middle of a long event
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue; // a comment, which the server sends while the request waits
      const data = part.replace(/^(event: .*\n)?data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error && !event.type) throw toError(event.error); // else it is the error of one page
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
