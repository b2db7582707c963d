// Blocks of a document's page as elements. Their texts are only ever text, or the safe subset of Markdown.
import { element } from "./dom.js";
import { markdown } from "./markdown.js";

/** Return the elements of a block. */
export function blockElements({ kind, level, text, text_format: format, cells }) {
  if (cells?.length) return [element("div", { className: "table" }, table(cells))];
  if (kind === "formula" || kind === "code") return [element("pre", {}, element("code", { textContent: text }))];
  if (format === "markdown") return markdown(kind === "heading" ? `${"#".repeat(Math.max(1, level ?? 1))} ${text}` : text);
  const tag = kind === "heading" ? `h${Math.min(6, Math.max(1, level ?? 1) + 2)}` : kind === "table" ? "pre" : "p";
  if (!text) return [element("p", { className: "unnamed" })]; // a picture, whose box says where it is
  return [element(tag, { textContent: text })];
}

function table(cells) {
  const rows = [];
  for (const { row, row_span: down, column_span: across, text, header } of [...cells].sort((a, b) => a.row - b.row || a.column - b.column)) {
    if (rows.at(-1)?.row !== row) rows.push({ row, made: element("tr") });
    rows.at(-1).made.append(element(header ? "th" : "td", { textContent: text, rowSpan: down ?? 1, colSpan: across ?? 1 }));
  }
  return element("table", {}, element("tbody", {}, ...rows.map(({ made }) => made)));
}
