// The page: what a person does, and which request follows.
import { getKey, sendJson, setKey } from "./api.js";
import { byId, element, iconButton, say } from "./dom.js";
import { DocumentView } from "./document_view.js";
import { isDocument } from "./documents.js";
import { EntryView } from "./entry.js";
import { listenForFiles, modality, preview, release, refusal } from "./files.js";
import * as history from "./history.js";
import { hasMicrophone, level, RATE, record } from "./microphone.js";
import { minutes } from "./player.js";
import { LiveSession } from "./realtime.js";
import { sampleFiles, samplesOf } from "./samples.js";
import { facts, startSettings } from "./settings.js";
import { canRun, missing, offered, TASKS } from "./tasks.js";
import { startTheme } from "./theme.js";

const page = { cards: [], card: null, files: [], conversation: null, views: new Map(), editing: null, work: null, recording: null };
const STOPPED = "Stopped.";

async function loadModels() {
  try {
    const { data } = await sendJson("v1/models");
    page.cards = data.filter(({ id, root }, index) => (root ? root === id : !index)); // each model under one name
  } catch (error) {
    return failed(error);
  }
  const several = page.cards.length > 1;
  byId("models").replaceChildren(...(several ? page.cards.map(({ id }) => element("option", { value: id, textContent: id })) : []));
  byId("models").hidden = !several;
  byId("model").hidden = several;
  chooseModel();
}

function chooseModel() {
  page.card = page.cards.find(({ id }) => id === byId("models").value) ?? page.cards[0];
  byId("model").textContent = page.card.id;
  byId("problem").textContent = "";
  const names = offered(page.card.capabilities);
  byId("tasks").replaceChildren(byId("tasks").firstElementChild, ...names.map(taskChoice));
  byId("send").disabled = !names.length;
  byId("model-facts").replaceChildren(...facts(page.card));
  showStart();
  if (!names.length) return (byId("problem").textContent = "This model writes no text; use the API.");
  chooseTask();
  const hears = page.card.capabilities.modalities.includes("audio") || names.includes("transcribe");
  byId("speak").hidden = !(hears && hasMicrophone());
}

/** Show what the model takes and samples to try, while there is no conversation. */
function showStart() {
  const { modalities, tasks } = page.card.capabilities;
  const names = { image: "images", video: "videos", audio: "sound" };
  const takes = ["text", ...Object.keys(names).filter((name) => modalities.includes(name) || (name === "audio" && tasks.includes("transcribe"))).map((name) => names[name])];
  byId("takes").textContent = `${page.card.id} takes ${takes.join(", ").replace(/, ([^,]*)$/, " and $1")}.`;
  byId("facts").replaceChildren(...facts(page.card));
  byId("samples").replaceChildren(...samplesOf(page.card).map((sample) => element("li", {}, iconButton("play", sample.title, () => trySample(sample)))));
  byId("documents").hidden = !page.card.capabilities.documents;
  byId("hint").hidden = page.conversation !== null;
}

async function trySample(sample) {
  if (page.work || page.recording) return;
  try {
    const files = await sampleFiles(sample);
    fill({ ...sample, files });
    await submit();
  } catch (error) {
    failed(error);
  }
}

/** Put a request into the form. */
function fill({ task, text, files }) {
  const box = document.querySelector(`#tasks input[value="${task}"]`);
  if (box) box.checked = true;
  chooseTask();
  page.files = [...files];
  byId("text").value = text;
  showFiles();
  byId("text").focus();
}

function taskChoice(name, index) {
  const box = element("input", { type: "radio", name: "task", value: name, checked: index === 0 });
  box.addEventListener("change", chooseTask);
  return element("label", {}, box, TASKS[name].name);
}

const chosenTask = () => document.querySelector("#tasks input:checked")?.value;

function chooseTask() {
  const { label, placeholder } = TASKS[chosenTask()];
  byId("text-label").textContent = label;
  byId("text").placeholder = placeholder;
}

/** Put files into the form, and read documents where the model can. */
async function addFiles(files) {
  if (!page.card) return;
  const documents = [...files].filter((file) => page.card.capabilities.documents && isDocument(file));
  if (documents.length && (page.work || page.recording)) return (byId("problem").textContent = "Wait for the answer, or stop it, before you add a document.");
  const problems = [];
  for (const file of [...files].filter((file) => !documents.includes(file))) {
    const reason = refusal(file, page.card.capabilities);
    if (reason) problems.push(reason);
    else page.files.push(file);
  }
  byId("problem").textContent = problems.join(" ");
  showFiles();
  say(`${page.files.length} files added`);
  byId("text").focus();
  for (const file of documents) {
    const entry = newEntry("document", "", [file]);
    await runEntry(entry, (options) => TASKS.document.run(entry, options));
    if (entry.error === STOPPED) break;
  }
}

function showFiles() {
  const rows = page.files.map((file) => {
    const button = element("button", { type: "button", className: "plain", textContent: "×", ariaLabel: `Remove ${file.name}` });
    button.addEventListener("click", () => {
      page.files = page.files.filter((one) => one !== file);
      showFiles();
      byId("text").focus();
    });
    return element("li", {}, preview(file), button);
  });
  release(byId("files"));
  byId("files").replaceChildren(...rows);
}

async function submit(event) {
  event?.preventDefault();
  if (page.work || page.recording || !page.card) return;
  const [task, text] = [chosenTask(), byId("text").value.trim()];
  const problem = missing(task, text, page.files);
  byId("problem").textContent = problem ?? "";
  if (problem) return;
  const entry = newEntry(task, text, page.files);
  if (page.editing) cutAt(page.editing);
  edit(null);
  page.files = [];
  byId("text").value = "";
  showFiles();
  await runEntry(entry, (options) => TASKS[task].run(entry, options));
}

const newEntry = (task, text, files) => ({ card: page.card, task, text, files, answer: "", reasoning: "", error: null, items: null, timings: null, usage: null, words: null, heard: { language: null, seconds: 0, took: 0 } });

/** Remove an entry and all that follow it. */
function cutAt(entry) {
  const { entries } = page.conversation;
  for (const one of entries.splice(entries.indexOf(entry))) {
    const { root } = page.views.get(one);
    release(root);
    root.remove();
    page.views.delete(one);
  }
}

async function retry(entry) {
  if (page.work || page.recording) return;
  if (!canRun(entry.task, page.card.capabilities)) return (byId("problem").textContent = `${page.card.id} does not offer ${TASKS[entry.task].name}.`);
  const again = newEntry(entry.task, entry.text, entry.files);
  edit(null);
  cutAt(entry);
  await runEntry(again, (options) => TASKS[again.task].run(again, options));
}

/** Put an entry into the form; its next answer takes the place of the old one. null: do not edit. */
function edit(entry) {
  if (page.work || page.recording) return;
  page.editing = entry;
  byId("editing").hidden = entry === null;
  if (entry) fill(entry);
}

/** Put the file of a document into the form, for a question about its pages. */
function askAbout({ files }) {
  if (page.work || page.recording) return;
  const reason = canRun("ask", page.card.capabilities) ? refusal(files[0], page.card.capabilities) : `${page.card.id} does not offer Ask.`;
  if (reason) return (byId("problem").textContent = reason);
  fill({ task: "ask", text: byId("text").value, files: [...page.files, ...files] });
}

/** Start or end a recording. It is transcribed live where the server can; otherwise it becomes a file of the request. */
async function speak() {
  if (page.work || page.recording || !page.card) return;
  const { realtime } = page.card.capabilities;
  byId("problem").textContent = "";
  try {
    if (chosenTask() === "transcribe" && realtime) await runEntry(newEntry("transcribe", "", []), transcribeLive);
    else await speakFile();
  } catch (error) {
    byId("problem").textContent = `The microphone cannot be used: ${error.message}`;
  }
}

async function speakFile() {
  const recorder = await record(showLevel());
  await recordingEnds();
  addFiles([recorder.stop()]);
  if (["transcribe", "translate"].includes(chosenTask())) await submit();
}

async function transcribeLive({ card, signal, update, view }) {
  const { entry } = view;
  const onChange = (items) => {
    entry.words = items.map(({ text, start, end }) => ({ word: text, start, end: end ?? Infinity }));
    entry.answer = items.map(({ text }) => text).join(" ");
    update();
  };
  let live = null;
  const show = showLevel();
  const recorder = await record((block) => {
    show(block);
    live?.push(block);
  });
  try {
    live = new LiveSession(card.id, signal, onChange);
    await Promise.race([recordingEnds(signal), live.done]);
  } finally {
    showRecording(null);
    entry.files = [recorder.stop()];
    view.addFile(entry.files[0]);
  }
  await live.finish(card.id);
}

/** Wait until the person ends the recording. */
function recordingEnds(signal = null) {
  return new Promise((resolve, reject) => {
    signal?.addEventListener("abort", () => reject(signal.reason));
    showRecording(() => resolve(showRecording(null)));
  });
}

function showRecording(end) {
  page.recording = end;
  byId("recording").hidden = end === null;
  showButtons();
  if (end) byId("end").focus();
  say(end ? "Recording" : "Recording ended");
}

/** Return a function that shows the level and the seconds of a recording, block by block. */
function showLevel() {
  let samples = 0;
  return (block) => {
    samples += block.length;
    byId("level").value = level(block);
    byId("recorded").textContent = minutes(samples / RATE);
  };
}

/** One of three large buttons is there: it sends, stops the answer, or ends the recording. */
function showButtons() {
  const { work, recording } = page;
  byId("end").hidden = !recording;
  byId("stop").hidden = !work || recording !== null;
  byId("send").hidden = work !== null || recording !== null;
  byId("add").disabled = byId("speak").disabled = work !== null || recording !== null;
}

/** Show an entry while `work` fills it, and keep it. */
async function runEntry(entry, work) {
  page.conversation ??= { id: crypto.randomUUID?.() ?? String(Math.random()), time: Date.now(), title: "", entries: [] };
  const { conversation } = page;
  const before = [...conversation.entries];
  conversation.entries.push(entry);
  conversation.title ||= entry.text || entry.files[0]?.name || TASKS[entry.task].name;
  const view = show(entry);
  const controller = setWork(new AbortController());
  let redraw = 0; // once for each frame of the screen, not for each token
  const draw = () => {
    redraw = 0;
    follow(() => view.update(page.work === controller));
  };
  say("Working");
  view.update(true);
  try {
    await work({ card: entry.card, before, signal: controller.signal, view, update: () => (redraw ||= requestAnimationFrame(draw)) });
    say("Done");
  } catch (error) {
    entry.error = controller.signal.aborted ? STOPPED : reason(error, [...before, entry]);
    say(entry.error);
    if (error.status === 401) askKey();
  } finally {
    if (page.work === controller) setWork(null);
    draw();
    conversation.time = Date.now();
    if (!conversation.deleted) await history.keep(conversation);
  }
}

/** Return the words of an error, with the name of the file at fault if it is known. */
function reason({ message, item }, entries) {
  const files = entries.flatMap(({ files }) => files);
  const same = files.filter((file) => modality(file) === item?.modality);
  const file = files.length === 1 ? files[0] : files.some((one) => modality(one) === "pdf") ? null : same[item?.index];
  return item && file ? `${file.name}: ${message}` : `${message[0].toUpperCase()}${message.slice(1)}.`.replace(/([.!?])\.$/, "$1");
}

function show(entry) {
  byId("hint").hidden = true;
  const view = entry.task === "document" ? new DocumentView(entry, { retry, ask: askAbout }) : new EntryView(entry, { retry, edit });
  page.views.set(entry, view);
  byId("entries").append(view.root);
  view.root.scrollIntoView({ block: "start" });
  return view;
}

/** Change the page, and stay at its end if that is where the person reads. */
function follow(change) {
  const root = document.scrollingElement;
  const atEnd = root.scrollHeight - root.scrollTop - root.clientHeight < 80;
  change();
  if (atEnd) root.scrollTop = root.scrollHeight;
}

function setWork(controller) {
  page.work = controller;
  showButtons();
  return controller;
}

function startConversation(conversation = null) {
  page.work?.abort();
  page.conversation = conversation;
  release(byId("entries"));
  byId("entries").replaceChildren();
  page.views.clear();
  page.editing = null;
  byId("editing").hidden = true;
  byId("hint").hidden = conversation !== null;
  for (const entry of conversation?.entries ?? []) show(entry);
  byId("text").focus();
}

async function showHistory() {
  const rows = (await history.all()).map((conversation) => {
    const open = element("button", { type: "button", className: "plain", textContent: conversation.title });
    const remove = element("button", { type: "button", className: "plain", textContent: "Delete", ariaLabel: `Delete ${conversation.title}` });
    open.addEventListener("click", () => {
      byId("history-dialog").close();
      startConversation(conversation);
    });
    remove.addEventListener("click", () => forget(conversation.id));
    return element("li", {}, open, remove);
  });
  byId("history").replaceChildren(...(rows.length ? rows : [element("li", { className: "quiet", textContent: "Nothing yet." })]));
  if (!byId("history-dialog").open) byId("history-dialog").showModal();
}

/** Delete one conversation, or all of them, also from the page. */
async function forget(id = null) {
  if (page.conversation && (id === null || page.conversation.id === id)) {
    page.conversation.deleted = true;
    startConversation();
  }
  await (id === null ? history.removeAll() : history.remove(id));
  await showHistory();
}

function failed(error) {
  byId("problem").textContent = error.message;
  if (error.status === 401) askKey();
}

function askKey() {
  byId("key").value = getKey();
  byId("key-dialog").returnValue = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function listen() {
  byId("composer").addEventListener("submit", submit);
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && (page.recording ? page.recording() : page.work?.abort()));
  byId("stop").addEventListener("click", () => {
    page.work?.abort();
    byId("text").focus();
  });
  byId("models").addEventListener("change", chooseModel);
  byId("speak").addEventListener("click", speak);
  byId("end").addEventListener("click", () => page.recording?.());
  byId("cancel-editing").addEventListener("click", () => {
    edit(null);
    fill({ task: chosenTask(), text: "", files: [] });
  });
  byId("add").addEventListener("click", () => byId("choose").click());
  byId("choose").addEventListener("change", () => {
    addFiles(byId("choose").files);
    byId("choose").value = "";
  });
  byId("new").addEventListener("click", () => startConversation());
  byId("open-history").addEventListener("click", showHistory);
  byId("delete-all").addEventListener("click", () => forget());
  byId("open-key").addEventListener("click", askKey);
  byId("cancel-key").addEventListener("click", () => byId("key-dialog").close());
  byId("key-dialog").addEventListener("close", () => {
    if (byId("key-dialog").returnValue !== "save") return;
    setKey(byId("key").value.trim());
    loadModels();
  });
  listenForFiles(addFiles);
}

startTheme();
startSettings();
listen();
loadModels();
