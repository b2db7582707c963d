// Live transcription over /v1/realtime.
import { ApiError, getKey, toError } from "./api.js";
import { RATE } from "./microphone.js";

/** The form in which any key may be the name of a subprotocol. */
function base64url(text) {
  const bytes = String.fromCharCode(...new TextEncoder().encode(text));
  return btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

const TEXT = "conversation.item.input_audio_transcription";

/** A session. `onChange` gets its items in order, each {text, start, end} with seconds, whenever one changes. */
export class LiveSession {
  constructor(model, signal, onChange) {
    this.items = new Map();
    this.ended = false;
    this.early = []; // blocks from before the connection was open
    const key = getKey();
    const url = new URL("v1/realtime?intent=transcription", document.baseURI).href.replace("http", "ws");
    this.socket = new WebSocket(url, ["realtime", ...(key ? [`sensorium-api-key-base64url.${base64url(key)}`] : [])]);
    this.socket.onopen = () => {
      this.configure({ type: "server_vad" }, model);
      for (const block of this.early.splice(0)) this.append(block);
    };
    this.done = new Promise((resolve, reject) => {
      this.socket.onmessage = ({ data }) => this.take(JSON.parse(data), onChange, resolve, reject);
      this.socket.onclose = () => reject(new ApiError("The connection for live audio was closed."));
      signal.addEventListener("abort", () => reject(signal.reason));
    }).finally(() => this.socket.close());
    this.done.catch(() => {}); // the caller awaits it later
  }

  configure(turn_detection, model) {
    const input = { format: { type: "audio/pcm", rate: RATE }, transcription: { model }, turn_detection };
    this.send({ type: "session.update", session: { type: "transcription", audio: { input } } });
  }

  /** Send a block of samples. */
  push(block) {
    if (this.socket.readyState === WebSocket.OPEN) this.append(block);
    else this.early.push(block);
  }

  append(block) {
    this.send({ type: "input_audio_buffer.append", audio: btoa(String.fromCharCode(...new Uint8Array(block.buffer))) });
  }

  /** Send what is left, and wait for its text: a short silence that is committed without turn detection comes last. */
  async finish(model) {
    if (this.socket.readyState === WebSocket.OPEN) {
      this.send({ type: "input_audio_buffer.commit" });
      this.configure(null, model);
      this.ended = true;
      this.append(new Int16Array(RATE / 10));
      this.send({ type: "input_audio_buffer.commit" });
    }
    await this.done;
  }

  send(event) {
    this.socket.send(JSON.stringify(event));
  }

  take(event, onChange, resolve, reject) {
    const item = this.items.get(event.item_id);
    if (event.type === "input_audio_buffer.speech_started") {
      this.items.set(event.item_id, { text: "", start: event.audio_start_ms / 1000, end: null });
    } else if (event.type === "input_audio_buffer.speech_stopped" && item) {
      item.end = event.audio_end_ms / 1000;
    } else if (event.type === `${TEXT}.delta` && item) {
      item.text += event.delta;
    } else if (event.type === `${TEXT}.completed` && item) {
      item.text = event.transcript;
    } else if (event.type.startsWith(TEXT) && !item && this.ended && event.type !== `${TEXT}.delta`) {
      return resolve();
    } else if (event.type === `${TEXT}.failed` || event.type === "error") {
      return reject(toError(event.error));
    } else {
      return;
    }
    onChange([...this.items.values()]);
  }
}
