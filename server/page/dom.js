// Elements, made without markup: texts of models and files are only ever text.

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Return one of the page's icons. */
export const icon = (name) => svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));

/** Return a button with an icon and a word. */
export function iconButton(name, word, onClick) {
  const button = element("button", { type: "button", className: "plain" }, icon(name), element("span", { textContent: word }));
  button.addEventListener("click", onClick);
  return button;
}

/** Tell screen readers what happened. */
export function say(text) {
  byId("status").textContent = text;
}
