// A safe subset of Markdown as elements: headings, lists, quotes, code, tables, links, bold and italic. Everything else is text.
import { element } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DELIMITER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /\\([\\`*_{}[\]()#+.!|>~-])|(`+)([^`\n]|[^`\n][^\n]*?[^`\n])\2(?!`)|\*\*(\S|\S[^\n]*?\S)\*\*|(?<![\w*])\*([^\s*]|[^\s*][^*\n]*?[^\s*])\*(?![\w*])|!?\[([^\]\n]*)\]\(([^)\s]+)\)/g;
const DEEPEST = 8; // quotes and lists within each other

/** Return the elements of a text. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const [made, next] = block(lines, at, depth);
    if (made) found.push(made);
    at = next;
  }
  return found;
}

/** Return the block that begins at a line (null for an empty line), and the line after it. */
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  if (FENCE.test(line)) return code(lines, at);
  const heading = line.match(HEADING);
  if (heading) return [element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (isTable(lines, at)) return table(lines, at);
  if (depth < DEEPEST && QUOTE.test(line)) {
    const end = endOf(lines, at, (one) => QUOTE.test(one));
    return [element("blockquote", {}, ...blocks(lines.slice(at, end).map((one) => one.match(QUOTE)[1]), depth + 1)), end];
  }
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  const end = Math.max(at + 1, endOf(lines, at, (one, index) => index === at || (one.trim() && !begins(lines, index, depth))));
  return [element("p", {}, ...inline(lines.slice(at, end).join("\n"))), end];
}

const begins = (lines, at, depth) =>
  FENCE.test(lines[at]) || HEADING.test(lines[at]) || RULE.test(lines[at]) || isTable(lines, at) || (depth < DEEPEST && (QUOTE.test(lines[at]) || ITEM.test(lines[at])));

function endOf(lines, at, belongs) {
  while (at < lines.length && belongs(lines[at], at)) at++;
  return at;
}

function code(lines, at) {
  const fence = lines[at].match(FENCE)[1];
  const end = endOf(lines, at + 1, (one) => !(one.trim().startsWith(fence) && !one.trim().replaceAll(fence[0], "")));
  return [element("pre", {}, element("code", { textContent: lines.slice(at + 1, end).join("\n") })), end + 1];
}

function list(lines, at, depth) {
  const [, indent, mark] = lines[at].match(ITEM);
  const isOrdered = /\d/.test(mark);
  const root = element(isOrdered ? "ol" : "ul");
  if (isOrdered) root.start = parseInt(mark, 10);
  while (at < lines.length) {
    const found = lines[at].match(ITEM);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== isOrdered) break;
    const end = endOf(lines, at + 1, (one) => one.trim() && (one.match(/^\s*/)[0].length > indent.length || !ITEM.test(one)) && !FENCE.test(one.slice(indent.length)));
    const rest = lines.slice(at + 1, end);
    const inset = Math.min(...rest.map((one) => one.match(/^\s*/)[0].length));
    root.append(element("li", {}, ...inline(found[3]), ...blocks(rest.map((one) => one.slice(inset)), depth + 1)));
    at = end;
    if (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at++; // items with an empty line between them
  }
  return [root, at];
}

const isTable = (lines, at) => lines[at].includes("|") && lines[at + 1]?.includes("-") && DELIMITER.test(lines[at + 1]) && cells(lines[at]).length === cells(lines[at + 1]).length;

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((one) => (one.endsWith(":") ? (one.startsWith(":") ? "center" : "right") : ""));
  const end = endOf(lines, at + 2, (one) => one.includes("|"));
  const row = (tag, line) => element("tr", {}, ...sides.map((side, index) => {
    const cell = element(tag, {}, ...inline(cells(line)[index] ?? ""));
    cell.style.textAlign = side;
    return cell;
  }));
  const body = lines.slice(at + 2, end).map((line) => row("td", line));
  const made = element("table", {}, element("thead", {}, row("th", lines[at])), element("tbody", {}, ...body));
  return [element("div", { className: "table" }, made), end];
}

function inline(text) {
  const found = [];
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, escaped, , code, bold, italic, label, url] = match;
    found.push(text.slice(last, match.index));
    last = match.index + whole.length;
    if (escaped !== undefined) found.push(escaped);
    else if (code !== undefined) found.push(element("code", { textContent: code }));
    else if (bold !== undefined) found.push(element("strong", {}, ...inline(bold)));
    else if (italic !== undefined) found.push(element("em", {}, ...inline(italic)));
    else found.push(link(label, url) ?? whole);
  }
  return [...found, text.slice(last)].filter((one) => one !== "");
}

/** Return a link to another page, or null for any other URL, such as javascript:. */
function link(label, url) {
  if (!/^(https?|mailto):/i.test(url)) return null;
  return element("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", textContent: label || url });
}
