// What a person can ask for, and how each request is sent.
import { events, send, sendJson, toError } from "./api.js";
import { findPrompt } from "./boxes.js";
import { readDocument } from "./documents.js";
import { messagePart, modality } from "./files.js";
import { getSettings } from "./settings.js";

export const READ_PROMPT = "Read the text.";

/** `needs`: files without which the task makes no sense; `textOptional`: it has a text of its own; `isPlain`: its answer has no Markdown. */
export const TASKS = {
  ask: { name: "Ask", label: "Question", placeholder: "Ask something…", run: ask },
  read: { name: "Read", label: "Prompt", placeholder: READ_PROMPT, needs: ["image", "pdf"], textOptional: true, run: ask },
  find: { name: "Find", label: "What to find", placeholder: "What to find, such as: the red cup", needs: ["image"], run: ask },
  transcribe: { name: "Transcribe", label: "Words to expect", placeholder: "Names and words to expect (optional)", needs: ["audio", "video"], textOptional: true, isPlain: true, run: transcribe },
  translate: { name: "Translate", label: "Words to expect", placeholder: "Names and words to expect (optional)", needs: ["audio", "video"], textOptional: true, isPlain: true, run: transcribe },
  document: { name: "Document", needs: [], textOptional: true, run: readDocument }, // begins when a document is added
};

/** Return the names of the tasks that a model has. */
export function offered({ tasks, modalities }) {
  const sees = modalities.includes("image");
  const chat = tasks.includes("chat") ? ["ask", ...(sees ? ["read", "find"] : [])] : [];
  return [...chat, ...tasks.filter((task) => task in TASKS)];
}

/** Return whether a model can do again what an entry has done. */
export const canRun = (name, capabilities) => (name === "document" ? capabilities.documents === true : offered(capabilities).includes(name));

/** Return why a request cannot be sent, or null. */
export function missing(name, text, files) {
  const { needs, textOptional } = TASKS[name];
  if (needs && !files.some((file) => needs.includes(modality(file)))) return `Add a file first: ${needs.join(" or ")}.`;
  return text || textOptional ? null : "Write what you want to know.";
}

function prompt({ task, text }, capabilities) {
  if (task === "find") return findPrompt(text, capabilities.architecture);
  return task === "read" ? text || READ_PROMPT : text;
}

async function message(entry, capabilities) {
  const parts = await Promise.all(entry.files.map(messagePart));
  return { role: "user", content: [...parts, { type: "text", text: prompt(entry, capabilities) }] };
}

/** Stream an answer into the entry. Only questions continue the conversation `before`. */
async function ask(entry, { card, before, signal, update }) {
  const { capabilities } = card;
  const { system, ...options } = getSettings();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const one of entry.task === "ask" ? before.filter(({ task, error }) => task === "ask" && !error) : [])
    messages.push(await message(one, capabilities), { role: "assistant", content: one.answer });
  const own = await message(entry, capabilities);
  const greedy = entry.task === "ask" ? {} : { temperature: 0 };
  const body = { model: card.id, messages: [...messages, own], stream: true, stream_options: { include_usage: true }, return_timings: true, ...greedy, ...options };
  const planned = entry.files.length ? plan(own, entry, { card, signal, update }) : null;
  for await (const chunk of events(await send("v1/chat/completions", body, signal))) {
    const delta = chunk.choices[0]?.delta ?? {};
    entry.answer += delta.content ?? "";
    entry.reasoning += delta.reasoning_content ?? "";
    entry.usage = chunk.usage ?? entry.usage;
    entry.timings = chunk.timings ?? entry.timings;
    update();
  }
  await planned;
}

/** Learn the grid of each item. Without it the answer is as good. */
async function plan(own, entry, { card, signal, update }) {
  const found = await sendJson("v1/media/plan", { model: card.id, messages: [own] }, signal).catch(() => null);
  entry.items = found?.items ?? [];
  update();
}

async function transcribe(entry, { card, signal, update }) {
  const { segment_times: segments, word_times: words } = card.capabilities;
  for (const file of entry.files.filter((file) => ["audio", "video"].includes(modality(file)))) {
    const form = new FormData();
    form.append("file", file, file.name);
    form.append("model", card.id);
    form.append("response_format", segments ? "verbose_json" : "json");
    if (segments && words && entry.task === "transcribe") form.append("timestamp_granularities[]", "word"); // instead of segments
    if (entry.text) form.append("prompt", entry.text);
    const start = performance.now();
    const found = await sendJson(`v1/audio/${entry.task === "translate" ? "translations" : "transcriptions"}`, form, signal);
    entry.answer += `${entry.answer && "\n"}${found.text.trim()}`;
    if (found.error) entry.error = toError(found.error).message; // the file is broken or cut off after this text
    entry.usage = found.usage;
    entry.heard.language = found.language ?? entry.heard.language;
    entry.heard.seconds += found.duration ?? found.usage?.seconds ?? 0;
    entry.heard.took += (performance.now() - start) / 1000;
    const several = entry.files.length > 1; // times of several files would mix
    entry.words = several ? null : (found.words ?? found.segments?.map(({ text, start, end }) => ({ word: text.trim(), start, end })));
    update();
  }
}
