// A document: its pages at the left, the chosen page with its blocks, its text, a search and downloads.
import { blockElements } from "./blocks.js";
import { download, hasImages } from "./documents.js";
import { element, iconButton, say, svg } from "./dom.js";
import { copy } from "./entry.js";
import { markHits, patternOf, textOf, unmark } from "./search.js";

const WAYS = { blank: "Blank page", text_layer: "Read from the text layer", draft: "Read by the model, with the text layer as its draft", reading: "Read from the picture", unread: "Not read" };
const PAUSE = 150; // milliseconds after a key before the search begins

export class DocumentView {
  /** `entry`: that of a document, see documents.js. `actions`: {retry, ask}, which get the entry. */
  constructor(entry, { retry, ask }) {
    this.entry = entry;
    this.urls = new Map(); // of the pages' pictures, by number
    this.thumbs = new Map(); // by number
    this.texts = new Map(); // of blocks, by number of the page, once they are searched
    this.hits = []; // {page, index} of each hit: the number of its page, and its place among the hits there
    this.current = -1; // the hit that is shown
    this.chosen = null; // number of the page
    this.isPicked = false; // a person has chosen it
    const [file] = entry.files;
    this.name = file.name;
    const request = element("p", { className: "request" }, element("b", { textContent: "Document" }), file.name);
    this.bar = element("progress", { ariaLabel: "Pages that have been read" });
    this.count = element("span");
    this.progress = element("p", { className: "quiet progress" }, this.bar, " ", this.count);
    this.wrong = element("p", { className: "wrong" });
    this.noPdf = element("p", { className: "quiet", hidden: true });
    const asked = hasImages(file) ? [["add", "Ask about it", () => ask(entry)]] : [];
    const buttons = [["copy", "Copy", () => copy(entry.answer)], ["retry", "Retry", () => retry(entry)], ...asked];
    this.tools = element("div", { className: "tools" }, ...buttons.map(([name, word, onClick]) => iconButton(name, word, onClick)));
    this.root = element("article", { className: "entry document" }, request, this.progress, this.makeSearch(), this.noPdf, this.makePanes(), this.wrong, this.tools);
    this.update();
  }

  makeSearch() {
    this.query = element("input", { type: "search", placeholder: "Search all pages", ariaLabel: "Search all pages" });
    this.found = element("output", { className: "quiet" });
    this.query.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.search(), PAUSE);
    });
    this.query.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing) return;
      event.preventDefault();
      if (this.timer) this.search(); // for what has just been typed
      else this.goTo(this.current + (event.shiftKey ? -1 : 1));
    });
    const steps = [iconButton("previous", "Previous", () => this.goTo(this.current - 1)), iconButton("next", "Next", () => this.goTo(this.current + 1))];
    const [pdf, ...saves] = ["pdf", "md", "json", "txt"].map((format) => iconButton("save", format, () => this.save(format)));
    pdf.title = "A searchable PDF";
    this.pdf = pdf;
    const names = element("span", { role: "group", ariaLabel: "Download" }, ...saves, pdf);
    this.searching = element("div", { className: "search" }, this.query, ...steps, this.found, element("span", { className: "space" }), names);
    return this.searching;
  }

  makePanes() {
    this.list = element("ol", { className: "thumbs", ariaLabel: "Pages" });
    this.frame = element("div", { className: "frame" });
    this.legend = element("ul", { className: "kinds quiet", ariaLabel: "Kinds of blocks" });
    this.facts = element("div", { className: "facts-of-page" });
    this.text = element("div", { className: "answer blocks" });
    const texts = element("section", { className: "texts", ariaLabel: "Text of the page" }, this.facts, this.text);
    this.panes = element("div", { className: "panes" }, this.list, element("div", { className: "sheet" }, this.legend, this.frame), texts);
    roving(this.list, (button) => this.pick(Number(button.dataset.page)));
    roving(this.text, () => {});
    return this.panes;
  }

  /** Show what the entry holds now. `working`: more will come. */
  update(working = false) {
    const { entry } = this;
    const sheets = entry.sheets ?? [];
    const pages = entry.document?.pages ?? [];
    this.progress.hidden = pages.length > 0;
    if (entry.pageCount) [this.bar.max, this.bar.value] = [entry.pageCount, sheets.length];
    this.count.textContent = entry.pageCount ? `${sheets.length} of ${entry.pageCount} pages` : working ? "Opening" : "";
    for (const sheet of sheets.slice(this.urls.size)) this.addSheet(sheet);
    this.panes.hidden = !this.thumbs.size;
    this.searching.hidden = !pages.length;
    this.tools.hidden = working;
    this.tools.firstChild.hidden = !pages.length; // there is nothing to copy
    this.wrong.textContent = entry.error ?? "";
    this.wrong.hidden = !entry.error;
    if (pages.length && !this.isComplete) this.complete(pages);
    else if (this.chosen === null && sheets.length) this.choose(sheets[0].page);
    else if (this.chosen !== null && entry.error) this.showText(); // no more will come
  }

  /** Add a page's thumbnail, in the order of pages: pages may end in another one. */
  addSheet({ page, image }) {
    this.urls.set(page, image && URL.createObjectURL(image));
    const picture = image ? element("img", { src: this.urls.get(page), alt: "", loading: "lazy", decoding: "async" }) : element("span", { className: "no-picture" });
    const mark = element("span", { className: "mark" });
    const button = element("button", { type: "button", className: "plain", tabIndex: this.thumbs.size ? -1 : 0 }, picture, element("span", { textContent: String(page) }), mark);
    button.dataset.page = page;
    button.ariaLabel = `Page ${page}`;
    button.addEventListener("click", () => this.pick(page));
    const next = [...this.list.children].find((one) => Number(one.firstChild.dataset.page) > page);
    this.list.insertBefore(element("li", {}, button), next ?? null);
    this.thumbs.set(page, { button, mark });
  }

  /** Show the result: what became of each page, and the texts. */
  complete(pages) {
    this.isComplete = true;
    this.pdf.hidden = !this.entry.contents?.pdf;
    this.noPdf.textContent = this.entry.noPdf ? `There is no searchable PDF: ${this.entry.noPdf}` : "";
    this.noPdf.hidden = !this.entry.noPdf;
    this.pages = new Map(pages.map((page) => [page.page, page]));
    for (const [number, page] of this.pages) {
      const { button, mark } = this.thumbs.get(number);
      const state = page.error ? "not read" : page.doubt ? "doubted" : page.way === "blank" ? "blank" : "";
      button.dataset.state = state;
      mark.textContent = state;
      button.ariaLabel = [`Page ${number}`, state].filter(Boolean).join(", ");
    }
    this.choose(this.isPicked ? this.chosen : pages[0].page);
  }

  pick(number) {
    this.isPicked = true;
    this.choose(number);
  }

  choose(number) {
    this.chosen = number;
    for (const [page, { button }] of this.thumbs) {
      button.ariaCurrent = page === number ? "page" : null;
      button.tabIndex = page === number ? 0 : -1;
    }
    reveal(this.list, this.thumbs.get(number).button);
    const page = this.pages?.get(number);
    this.showText(page);
    this.showPicture(number, page);
    this.markPage();
  }

  showPicture(number, page) {
    const url = this.urls.get(number);
    const { imageError } = this.entry.sheets.find((one) => one.page === number);
    const shown = url
      ? element("img", { src: url, alt: `Page ${number}` })
      : element("p", { className: imageError ? "wrong" : "quiet", textContent: imageError ? `There is no picture of this page: ${imageError}` : "This document has text without pictures of pages." });
    this.frame.replaceChildren(shown);
    if (url && page) this.frame.append(this.drawing(page));
    const kinds = (page?.blocks ?? []).map(({ kind }) => kind);
    this.legend.replaceChildren(...[...new Set(kinds)].map((kind) => {
      const count = kinds.filter((one) => one === kind).length;
      return element("li", {}, element("span", { className: `swatch kind-${kind}`, ariaHidden: "true" }), `${kind.replace("_", " ")} ${count}`);
    }));
  }

  /** Return the boxes of a page's blocks, in points. */
  drawing({ size: [width, height], blocks }) {
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "overlay", "aria-hidden": "true" });
    for (const { order, kind, box } of blocks.filter((block) => block.box)) {
      const [left, top, right, bottom] = box;
      const title = svg("title", {}, kind.replace("_", " "));
      const rect = svg("rect", { x: left, y: top, width: Math.max(0, right - left), height: Math.max(0, bottom - top), class: `block-box kind-${kind}`, "data-order": order }, title);
      rect.addEventListener("click", () => this.block(order).focus());
      this.link(rect, order);
      drawing.append(rect);
    }
    return drawing;
  }

  showText(page) {
    this.facts.replaceChildren(...(page ? factsOf(page) : [element("p", { className: "quiet", textContent: this.entry.error ? "Reading ended before the text of this page." : "The text follows when all pages have been read." })]));
    const made = (page?.blocks ?? []).map((block, index) => {
      const root = element("div", { className: `block kind-${block.kind}`, tabIndex: index ? -1 : 0, role: "group", title: block.kind.replace("_", " ") }, ...blockElements(block));
      root.dataset.order = block.order;
      this.link(root, block.order);
      root.addEventListener("focus", () => this.light(block.order, "chosen"));
      return root;
    });
    this.text.replaceChildren(...made);
  }

  block(order) {
    return this.text.querySelector(`[data-order="${order}"]`);
  }

  /** Light up a block and its box while the pointer is over one of them. */
  link(root, order) {
    root.addEventListener("pointerenter", () => this.light(order, "over"));
    root.addEventListener("pointerleave", () => this.light(null, "over"));
  }

  light(order, name) {
    for (const one of this.panes.querySelectorAll("[data-order]")) one.classList.toggle(name, one.dataset.order === String(order));
    if (name !== "chosen") return;
    this.frame.querySelector(`[data-order="${order}"]`)?.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.block(order)?.scrollIntoView({ block: "nearest" });
  }

  /** Find the hits on all pages, and show the first one on this page or after it. */
  search() {
    clearTimeout(this.timer);
    this.timer = null;
    this.pattern = patternOf(this.query.value);
    this.hits = [];
    for (const [number, page] of this.pages) {
      if (!this.texts.has(number)) this.texts.set(number, page.blocks.map((block) => textOf(element("div", {}, ...blockElements(block))).text));
      const count = this.pattern ? this.texts.get(number).reduce((sum, text) => sum + [...text.matchAll(this.pattern)].length, 0) : 0;
      for (let index = 0; index < count; index++) this.hits.push({ page: number, index });
      this.thumbs.get(number).button.dataset.hits = count || "";
    }
    this.current = -1;
    this.markPage();
    const first = this.hits.findIndex(({ page }) => page >= this.chosen);
    if (this.hits.length) this.goTo(Math.max(0, first));
    else this.found.textContent = this.pattern ? "no hits" : "";
  }

  /** Show a hit by its place among all. */
  goTo(index) {
    if (!this.hits.length) return;
    this.current = (index + this.hits.length) % this.hits.length;
    const { page } = this.hits[this.current];
    if (page !== this.chosen) this.choose(page);
    else this.markPage();
    const pages = new Set(this.hits.map((hit) => hit.page)).size;
    this.found.textContent = `${this.current + 1} of ${this.hits.length} on ${pages} ${pages === 1 ? "page" : "pages"}`;
    say(this.found.textContent);
  }

  /** Mark the hits on the chosen page, and the one that is shown. */
  markPage() {
    unmark(this.text);
    const marks = this.pattern ? [...this.text.children].flatMap((block) => markHits(block, this.pattern)) : [];
    const hit = this.hits[this.current];
    const now = hit?.page === this.chosen ? (marks[hit.index] ?? []) : [];
    for (const mark of now) mark.classList.add("now");
    now[0]?.scrollIntoView({ block: "nearest" });
    const withHits = new Set(marks.flat().map((mark) => mark.closest(".block").dataset.order));
    for (const box of this.frame.querySelectorAll(".block-box")) box.classList.toggle("hit", withHits.has(box.dataset.order));
  }

  save(format) {
    const url = URL.createObjectURL(download(this.entry, format));
    element("a", { href: url, download: `${this.name.replace(/\.[^.]*$/, "")}.${format}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }
}

/** Return how a page was read, and what is wrong with it. */
function factsOf({ way, reason, error, doubt, blocks }) {
  const found = [element("p", { className: "quiet", textContent: `${WAYS[way] ?? way}${reason ? `: ${reason}` : ""}.` })];
  if (error) found.push(element("p", { className: "wrong", textContent: `This page was not read: ${error.message}` }));
  if (doubt) found.push(element("p", { className: "doubt", textContent: `The text is doubted: ${doubt}` }));
  if (!error && !blocks.length && way !== "blank") found.push(element("p", { className: "quiet", textContent: "No text was found on this page." }));
  return found;
}

/** Scroll a list, and not the page around it, so that an element of it is seen. */
function reveal(list, one) {
  const [outer, inner] = [list.getBoundingClientRect(), one.getBoundingClientRect()];
  list.scrollTop += Math.min(0, inner.top - outer.top) + Math.max(0, inner.bottom - outer.bottom);
  list.scrollLeft += Math.min(0, inner.left - outer.left) + Math.max(0, inner.right - outer.right);
}

/** Let arrow keys, Home and End move the focus among a list's elements, of which one is in the order of Tab. */
function roving(root, onMove) {
  root.addEventListener("keydown", (event) => {
    const all = [...root.querySelectorAll("button, .block")];
    const at = all.indexOf(event.target);
    const steps = { ArrowDown: at + 1, ArrowRight: at + 1, ArrowUp: at - 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 };
    const next = all[steps[event.key]];
    if (at < 0 || !next) return;
    event.preventDefault();
    all[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    onMove(next);
  });
}
