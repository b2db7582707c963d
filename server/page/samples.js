// What a person can try at once: three requests that fit the model.
import { send } from "./api.js";
import { offered } from "./tasks.js";

const IMAGES = [
  { title: "Read a receipt", task: "read", text: "Read the receipt.", file: "receipt1.png" },
  { title: "Read a word", task: "read", text: "Read the text.", file: "line1.png" },
  { title: "Describe a picture", task: "ask", text: "What is in this picture?", file: "receipt2.png" },
];
const SPEECH = [
  { title: "An alarm", task: "transcribe", text: "", file: "alarm.flac" },
  { title: "A command", task: "transcribe", text: "", file: "command.flac" },
  { title: "A date", task: "transcribe", text: "", file: "date.flac" },
];
const SOUND = SPEECH.map((sample) => ({ ...sample, task: "ask", text: "What is said here?" }));
const TEXTS = ["Explain how a rainbow forms.", "Write a poem of four lines about rain.", "Which is larger, 0.9 or 0.11?"].map((text) => ({ title: text, task: "ask", text, file: null }));

/** Return the samples of a model: {title, task, text, file}. */
export function samplesOf({ capabilities }) {
  const tasks = offered(capabilities);
  const found = [
    ...(tasks.includes("read") ? IMAGES : []),
    ...(tasks.includes("transcribe") ? SPEECH : []),
    ...(tasks.includes("ask") && capabilities.modalities.includes("audio") ? SOUND : []),
    ...(tasks.includes("ask") ? TEXTS : []),
  ];
  return found.slice(0, 3);
}

/** Return the file of a sample in a list, or an empty one. */
export async function sampleFiles({ file }) {
  if (!file) return [];
  const content = await (await send(`page/samples/${file}`)).blob();
  return [new File([content], file, { type: content.type })];
}
