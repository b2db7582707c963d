// Documents: which files are some, and how one is read page by page.
import { events, send } from "./api.js";

const TYPES = ["application/pdf", "image/tiff", "application/epub+zip", "text/html", "application/xhtml+xml", "text/markdown", "text/plain"];
const NAMES = /\.(pdf|tiff?|epub|x?html?|md|markdown|txt|text)$/i;
const IMAGE_SIZE = 1400; // pixels of the longer side of a page's picture

/** Return whether a file has pages or text that /v1/documents reads. Pictures of one page are left to questions. */
export const isDocument = (file) => TYPES.includes(file.type) || NAMES.test(file.name);

/** Return whether a document may also be sent with a question: its pages are images. */
export const hasImages = (file) => file.type === "application/pdf" || file.type === "image/tiff";

/** Read the file of an entry. `entry.sheets` gets each page when it has been read, and `entry.document` the result. */
export async function readDocument(entry, { card, signal, update }) {
  const [file] = entry.files;
  const form = new FormData();
  form.append("file", file, file.name);
  const fields = [["model", card.id], ["stream", "true"], ["page_image_size", IMAGE_SIZE], ["include[]", "md"], ["include[]", "txt"]];
  for (const [name, value] of fields) form.append(name, value);
  entry.sheets = [];
  for await (const event of events(await send("v1/documents", form, signal))) {
    if (event.type === "document.page.done") {
      entry.sheets.push({ page: event.page, image: toBlob(event.image), imageError: event.image_error?.message ?? null });
      entry.pageCount = event.page_count;
      update();
    } else if (event.type === "document.done") {
      const { contents, ...document } = event.document;
      Object.assign(entry, { document, contents, answer: contents.md });
      return;
    }
  }
}

function toBlob(url) {
  if (!url) return null;
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (one) => one.charCodeAt(0));
  return new Blob([bytes], { type: "image/jpeg" });
}

/** Return the content and the type of a download: "md", "json" or "txt". */
export function download({ document, contents }, format) {
  if (format === "json") return [JSON.stringify(document, null, 1), "application/json"];
  return [contents[format], format === "md" ? "text/markdown" : "text/plain"];
}
