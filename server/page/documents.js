// Documents: which files are some, and how one is read page by page.
import { events, send } from "./api.js";

const TYPES = ["application/pdf", "image/tiff", "application/epub+zip", "text/html", "application/xhtml+xml", "text/markdown", "text/plain"];
const NAMES = /\.(pdf|tiff?|epub|x?html?|md|markdown|txt|text)$/i;
const TEXT_TYPES = { md: "text/markdown", txt: "text/plain", json: "application/json" };
const IMAGE_SIZE = 1400; // pixels of the longer side of a page's picture
const MAX_PDF = 32 << 20; // bytes of a file of which a searchable PDF is made: this page holds it several times

/** Return whether a file has pages or text that /v1/documents reads. Pictures of one page are left to questions. */
export const isDocument = (file) => TYPES.includes(file.type) || NAMES.test(file.name);

/** Return whether a document may also be sent with a question: its pages are images. */
export const hasImages = (file) => file.type === "application/pdf" || file.type === "image/tiff";

/** Read the file of an entry. `entry.sheets` gets each page when it has been read, and `entry.document` the result. */
export async function readDocument(entry, { card, signal, update }) {
  const [file] = entry.files;
  const form = new FormData();
  form.append("file", file, file.name);
  const fields = [["model", card.id], ["stream", "true"], ["page_image_size", IMAGE_SIZE]];
  const formats = ["md", "txt", ...(hasImages(file) && file.size <= MAX_PDF ? ["pdf"] : [])].map((format) => ["include[]", format]);
  for (const [name, value] of [...fields, ...formats]) form.append(name, value);
  entry.sheets = [];
  for await (const event of events(await send("v1/documents", form, signal))) {
    if (event.type === "document.page.done") {
      entry.sheets.push({ page: event.page, image: toBlob(event.image, "image/jpeg"), imageError: event.image_error?.message ?? null });
      entry.pageCount = event.page_count;
      update();
    } else if (event.type === "document.done") {
      const { contents, content_errors: errors, ...document } = event.document;
      const pdf = toBlob(contents.pdf, "application/pdf"); // null if there is none
      Object.assign(entry, { document, contents: { ...contents, pdf }, answer: contents.md, noPdf: whyNoPdf(file, errors) });
      return;
    }
  }
}

/** Return why there is no searchable PDF of a file that could have one, or "". */
function whyNoPdf(file, errors) {
  if (!hasImages(file)) return "";
  if (file.size > MAX_PDF) return `the file has more than ${MAX_PDF >> 20} MiB; sensorium read --format pdf makes one`;
  return errors?.pdf?.message ?? "";
}

/** Return the bytes of a data URL, or of base64 alone; null for none. */
function toBlob(text, type) {
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text.slice(text.indexOf(",") + 1)), (one) => one.charCodeAt(0));
  return new Blob([bytes], { type });
}

/** Return a download as a blob: "md", "json", "txt" or "pdf"; null if there is none. */
export function download({ document, contents }, format) {
  if (format === "pdf") return contents.pdf ?? null;
  const text = format === "json" ? JSON.stringify(document, null, 1) : contents[format];
  return new Blob([text], { type: TEXT_TYPES[format] });
}
