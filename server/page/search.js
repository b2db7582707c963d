// Words in the texts of elements: counted, and marked.
import { element } from "./dom.js";

const CUT = "\0"; // between two texts that do not stand in one line, so that no hit goes over it
const PARTS = "td, th, li, p, pre, h1, h2, h3, h4, h5, h6";

/** Return a pattern that finds a text in any case, or null for an empty one. */
export function patternOf(text) {
  const words = text.trim().split(/\s+/).map((word) => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  return words[0] ? new RegExp(words.join("\\s+"), "giu") : null;
}

/** Return the text nodes of an element, and their texts in one. */
export function textOf(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const nodes = [];
  let text = "";
  let last = null;
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const part = node.parentElement.closest(PARTS);
    if (part !== last) text += CUT;
    last = part;
    nodes.push({ node, start: text.length });
    text += node.data;
  }
  return { nodes, text };
}

/** Mark the hits of a pattern in an element. Return the marks of each hit: several where its words are formatted differently. */
export function markHits(root, pattern) {
  const { nodes, text } = textOf(root);
  const hits = [...text.matchAll(pattern)].map((match) => ({ start: match.index, end: match.index + match[0].length, marks: [] }));
  for (const { node, start } of nodes) {
    let rest = node;
    let at = start;
    const end = start + node.data.length;
    for (const hit of hits.filter((one) => one.start < end && one.end > start)) {
      const from = Math.max(hit.start, start);
      rest = rest.splitText(from - at);
      const after = rest.splitText(Math.min(hit.end, end) - from);
      const mark = element("mark");
      rest.replaceWith(mark);
      mark.append(rest);
      hit.marks.push(mark);
      at = Math.min(hit.end, end);
      rest = after;
    }
  }
  return hits.map(({ marks }) => marks);
}

/** Remove the marks. */
export function unmark(root) {
  for (const mark of root.querySelectorAll("mark")) mark.replaceWith(...mark.childNodes);
  root.normalize();
}
