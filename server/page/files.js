// Files that a person gives: their modality, and their form in a message.
import { element } from "./dom.js";
import { player } from "./player.js";

/** Return "image", "video", "audio" or "pdf"; null for another file. */
export function modality(file) {
  if (file.type === "application/pdf") return "pdf";
  const kind = file.type.split("/")[0];
  return ["image", "video", "audio"].includes(kind) ? kind : null;
}

/** Return why the model cannot take a file, or null. A PDF consists of images. */
export function refusal(file, capabilities) {
  const kind = modality(file);
  const others = capabilities.documents ? "document" : "PDF";
  if (kind === null) return `${file.name} is not an image, video, audio file or ${others}.`;
  const known = [...capabilities.modalities, ...(capabilities.tasks.includes("transcribe") ? ["audio"] : [])];
  if (known.includes(kind === "pdf" ? "image" : kind)) return null;
  return `${file.name}: this model takes ${known.join(" and ") || "text only"}, not ${kind}.`;
}

/** Return the part of a message for a file. */
export async function messagePart(file) {
  const kind = modality(file);
  const url = await dataUrl(file);
  if (kind === "pdf") return { type: "file", file: { file_data: url, filename: file.name } };
  return { type: `${kind}_url`, [`${kind}_url`]: { url } };
}

/** Return an element that shows a file. */
export function preview(file) {
  const kind = modality(file);
  if (kind === "pdf" || file.type === "image/tiff") return element("span", { className: "pdf", textContent: file.name });
  const url = URL.createObjectURL(file);
  if (kind === "image") return element("img", { src: url, alt: file.name });
  if (kind === "audio") return player(url, file.name);
  const media = element(kind, { src: url, controls: true, preload: "metadata" });
  media.setAttribute("aria-label", file.name);
  return media;
}

/** Free the files that the elements below `parent` show. Call it before these elements are removed. */
export function release(parent) {
  for (const shown of parent.querySelectorAll("[src^='blob:']")) {
    const url = shown.src;
    shown.removeAttribute("src"); // a player that still loads the file would report that it is gone
    shown.load?.();
    URL.revokeObjectURL(url);
  }
}

/** Call a function with the files that a person pastes, or drops anywhere on the page. */
export function listenForFiles(add) {
  document.addEventListener("paste", (event) => event.clipboardData.files.length && add(event.clipboardData.files));
  for (const [name, over] of [["dragover", true], ["dragleave", false], ["drop", false]]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      document.body.classList.toggle("dropping", over);
      if (name === "drop") add(event.dataTransfer.files);
    });
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
