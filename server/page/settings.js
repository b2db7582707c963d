// Settings of answers, kept in this browser: a system prompt, the temperature and the longest answer. Empty ones are the model's.
import { byId, element } from "./dom.js";

const NAME = "sensorium.settings";
const FIELDS = ["system", "temperature", "max_tokens"];

/** Return {system, temperature, max_tokens}; those that are not set are missing. */
export function getSettings() {
  const kept = JSON.parse(localStorage.getItem(NAME) ?? "{}");
  return Object.fromEntries(FIELDS.filter((name) => name in kept).map((name) => [name, kept[name]]));
}

function keep() {
  const values = {};
  for (const name of FIELDS) {
    const text = byId(name).value.trim();
    if (text) values[name] = name === "system" ? text : Number(text);
  }
  if (Object.keys(values).length) localStorage.setItem(NAME, JSON.stringify(values));
  else localStorage.removeItem(NAME);
}

export function startSettings() {
  const dialog = byId("settings-dialog");
  byId("open-settings").addEventListener("click", () => {
    const kept = getSettings();
    for (const name of FIELDS) byId(name).value = kept[name] ?? "";
    dialog.showModal();
  });
  byId("reset-settings").addEventListener("click", () => FIELDS.forEach((name) => (byId(name).value = "")));
  byId("cancel-settings").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", keep); // before the dialog closes; its event "close" comes later
}

/** Return what the server tells about a model as a list. */
export function facts(card) {
  const { architecture, modalities, tasks, realtime } = card.capabilities;
  const rows = [["architecture", architecture], ["context", `${card.max_model_len} tokens`], ["takes", ["text", ...modalities].join(", ")]];
  if (tasks.length) rows.push(["tasks", tasks.join(", ")]);
  if (realtime) rows.push(["live audio", "yes"]);
  if (card.state) rows.push(["state", card.state.replace("_", " ")]);
  return rows.filter(([, value]) => value).map(([name, value]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
}
