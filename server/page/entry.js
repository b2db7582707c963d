// One request and its answer on the page.
import { findBoxes } from "./boxes.js";
import { element, iconButton, say } from "./dom.js";
import { modality, preview } from "./files.js";
import { markdown } from "./markdown.js";
import { overlay, resizedSize, rowGrid } from "./overlay.js";
import { TASKS } from "./tasks.js";

/** Key in `timings`, name, and what happens in this time. */
const STAGES = [
  ["fetch", "fetch", "files are fetched from their URLs"],
  ["plan", "plan", "sizes are read from the files' headers"],
  ["queue", "queue", "the request waits for others"],
  ["decode", "decode", "files become pixels and samples"],
  ["process", "process", "pixels and samples become the encoder's input"],
  ["encode", "encode", "the encoder computes its rows"],
  ["prefill", "prefill", "the model reads the prompt"],
  ["decode_steps", "answer", "the model writes the answer"],
];

export class EntryView {
  /**
   * `entry`: {card, task, text, files, answer, reasoning, error, items, timings, usage, words, heard}; `card`: its model's.
   * `actions`: {retry, edit}, which get the entry.
   */
  constructor(entry, { retry, edit }) {
    this.entry = entry;
    this.capabilities = entry.card.capabilities;
    this.reasoning = element("div", { className: "reasoning" });
    this.thoughts = element("details", { hidden: true }, element("summary", { textContent: "Reasoning" }), this.reasoning);
    this.answer = element("div", { className: "answer", ariaLive: "polite" });
    this.wrong = element("p", { className: "wrong" });
    this.meta = element("div", { className: "meta" });
    const request = element("p", { className: "request" }, element("b", { textContent: TASKS[entry.task].name }), entry.text);
    this.media = element("div", { className: "media without-grid" });
    this.players = [];
    this.frames = []; // {frame, image} of each image
    for (const file of entry.files) this.addFile(file);
    const buttons = [["copy", "Copy", () => copy(entry.answer)], ["retry", "Retry", () => retry(entry)], ["edit", "Edit", () => edit(entry)]];
    this.tools = element("div", { className: "tools" }, ...buttons.map(([name, word, onClick]) => iconButton(name, word, onClick)));
    this.root = element("article", { className: "entry" }, request, this.media, this.thoughts, this.answer, this.wrong, this.tools, this.meta);
    this.update();
  }

  addFile(file) {
    this.media.append(this.figure(file));
  }

  figure(file) {
    const shown = preview(file);
    if (modality(file) === "audio" || modality(file) === "video") this.players.push(shown.querySelector("audio") ?? shown);
    if (modality(file) !== "image") return element("figure", {}, shown, element("figcaption", { textContent: file.name }));
    const frame = element("div", { className: "frame" }, shown);
    this.frames.push({ frame, image: shown });
    shown.addEventListener("load", () => this.draw());
    return element("figure", {}, frame, element("figcaption", { textContent: file.name }));
  }

  /** Show what the entry holds now. `working`: more will come. */
  update(working = false) {
    const { entry } = this;
    this.answer.setAttribute("aria-busy", working);
    this.answer.classList.toggle("working", working);
    this.thoughts.hidden = !entry.reasoning;
    this.reasoning.textContent = entry.reasoning ?? "";
    if (entry.words?.length) this.showWords();
    else if (TASKS[entry.task].isPlain) this.answer.textContent = entry.answer;
    else this.answer.replaceChildren(...markdown(entry.answer));
    this.tools.hidden = working;
    this.wrong.textContent = entry.error ?? "";
    this.wrong.hidden = !entry.error;
    if (!working) this.meta.replaceChildren(...this.details());
    this.draw();
  }

  /** Draw rows and boxes. Boxes belong to the only image; with several images the answer does not say which. */
  draw() {
    const items = (this.entry.items ?? []).filter((item) => item.modality === "image");
    this.frames.forEach(({ frame, image }, index) => {
      const { naturalWidth: width, naturalHeight: height } = image;
      if (!width) return; // not loaded yet
      const item = items[index];
      const size = { width, height, resized: item ? resizedSize(item, this.capabilities.patch_size) : null };
      const boxes = this.frames.length === 1 ? findBoxes(this.entry.answer, size, this.capabilities.architecture) : [];
      frame.querySelector("svg")?.remove();
      frame.append(overlay(width, height, item ? rowGrid(item) : null, boxes));
      const labels = boxes.map(({ label }) => label || "box").join(", ");
      if (boxes.length) image.alt = `${this.entry.files[0].name}; marked: ${labels}`;
    });
  }

  showWords() {
    const spans = this.entry.words.map(({ word, start, end }) => {
      const span = element("span", { className: "word", textContent: word });
      span.addEventListener("click", () => this.players.forEach((player) => (player.currentTime = start)));
      return { span, start, end };
    });
    this.answer.replaceChildren(...spans.flatMap(({ span }) => [span, " "]));
    for (const player of this.players) {
      player.ontimeupdate = () => {
        const now = player.currentTime;
        for (const { span, start, end } of spans) span.classList.toggle("now", start <= now && now < end);
      };
    }
  }

  /** Return the bar of stages and the list of numbers. */
  details() {
    const { timings, usage, items, heard } = this.entry;
    const found = [];
    if (timings) {
      const stages = STAGES.filter(([key]) => timings[key] > 0);
      const bar = element("div", { className: "bar", ariaHidden: "true" });
      for (const [key, name] of stages) {
        const part = element("span", { title: name, className: `stage-${key}` });
        part.style.flexGrow = timings[key];
        bar.append(part);
      }
      found.push(bar);
    }
    const list = element("dl");
    const add = (name, value) => list.append(element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
    for (const [key, name, meaning] of STAGES) {
      if (!(timings?.[key] > 0)) continue;
      const swatch = element("span", { className: `swatch stage-${key}`, ariaHidden: "true" });
      list.append(element("div", { title: meaning }, element("dt", {}, swatch, name), element("dd", { textContent: milliseconds(timings[key]) })));
    }
    const count = usage?.completion_tokens;
    if (timings?.decode_steps > 0 && count > 1) add("per token", milliseconds(timings.decode_steps / (count - 1)));
    if (heard?.language) add("language", heard.language);
    if (usage?.seconds !== undefined) add("audio", `${(heard?.seconds || usage.seconds).toFixed(1)} s`);
    if (heard?.seconds && heard.took) add("real-time factor", (heard.took / heard.seconds).toFixed(2));
    if (usage?.prompt_tokens) add("tokens", `${usage.prompt_tokens} → ${count}`);
    const drafts = usage?.completion_tokens_details;
    if (drafts?.accepted_prediction_tokens !== undefined) {
      const accepted = drafts.accepted_prediction_tokens;
      add("drafted tokens", `${accepted} of ${accepted + drafts.rejected_prediction_tokens} accepted`);
    }
    const rows = (items ?? []).reduce((sum, item) => sum + item.num_embeds, 0);
    if (rows) add("encoder rows", String(rows));
    found.push(list);
    if (timings) found.push(legend(timings));
    if (items?.some((item) => item.modality === "image" && rowGrid(item))) found.push(this.gridSwitch());
    return found;
  }

  gridSwitch() {
    const box = element("input", { type: "checkbox", checked: !this.media.classList.contains("without-grid") });
    box.addEventListener("change", () => this.media.classList.toggle("without-grid", !box.checked));
    return element("label", { className: "quiet" }, box, " grid of encoder rows");
  }
}

/** Return what the stages' names mean. */
function legend(timings) {
  const rows = STAGES.filter(([key]) => timings[key] > 0).map(([key, name, meaning]) =>
    element("li", {}, element("span", { className: `swatch stage-${key}`, ariaHidden: "true" }), `${name}: ${meaning}`));
  return element("details", { className: "legend quiet" }, element("summary", { textContent: "What the times mean" }), element("ul", {}, ...rows));
}

export async function copy(text) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    // pages over plain HTTP have no clipboard
    const area = element("textarea", { value: text, className: "hidden" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say("Copied");
}

function milliseconds(seconds) {
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}
