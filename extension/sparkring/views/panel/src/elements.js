// Functions that make and change elements of the page.

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Return an SVG with an empty path. CSS may stretch the SVG.
export function drawing(look, width, height) {
  const [svg, path] = ["svg", "path"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [key, value] of Object.entries({ class: look, width, height, viewBox: `0 0 ${width} ${height}`,
    preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(key, value);
  svg.append(path);
  return svg;
}

export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Show pairs of a name and a value in an element that is a grid of two columns.
export function fillPairs(element, pairs) {
  element.replaceChildren(...pairs.flatMap(([name, value]) => [make("b", {}, name), make("span", {}, value)]));
}

// Replace the content of an element by HTML. Elements inside that can have the focus keep it, and their scrolling; elements that
// scroll can have the focus. `details` elements stay open if they were open before.
export function refill(element, html) {
  const inside = () => [...element.querySelectorAll("a[href], button, input, select, summary, [tabindex]")];
  const open = new Set([...element.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
  const { activeElement } = element.getRootNode();
  const before = inside().map((each) => [each.scrollTop, each.scrollLeft, each === activeElement]);
  const top = element.scrollTop;
  element.innerHTML = html;
  for (const summary of element.querySelectorAll("details > summary")) {
    if (open.has(summary.textContent)) summary.parentElement.open = true;
  }
  inside().slice(0, before.length).forEach((each, at) => {
    const [down, across, focused] = before[at];
    if (down || across) each.scrollTo({ top: down, left: across, behavior: "instant" });
    if (focused) each.focus({ preventScroll: true });
  });
  element.scrollTop = top;
}

// Return whether text inside an element is selected.
export function holdsSelection(element) {
  const selection = document.getSelection();
  return !selection.isCollapsed && element.contains(selection.anchorNode);
}

export function button(look, text, title, onclick, attributes = {}) {
  return make("button", { type: "button", class: look, title, onclick, ...attributes }, text);
}

// Return a button that each click switches on or off. After a click, `set` is called with the new state.
export function toggle(text, title, on, set) {
  const element = button("sr-toggle", text, title, () => {
    const now = element.getAttribute("aria-pressed") !== "true";
    element.setAttribute("aria-pressed", String(now));
    set(now);
  }, { "aria-pressed": String(on) });
  return element;
}

// Return a <select>. `set` is called with the name of the option that the user selects.
export function choice(label, names, set) {
  const element = make("select", { "aria-label": label, onchange: () => set(element.value) });
  refillChoice(element, names);
  return element;
}

export function refillChoice(element, names) {
  if (String(names) === String(Array.from(element.options, ({ value }) => value))) return;
  element.replaceChildren(...names.map((name) => new Option(name, name)));
}

const REVOKE_MS = 10_000; // after this time, the browser has read the data of a download, so the data can be freed

// Save a Blob as a file. VS Code saves the file itself, but handles only clicks on links that are in the page.
export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = make("a", { href: address, download: name, hidden: true });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), REVOKE_MS);
}

// Return the colour of the background behind an element.
export function background(element) {
  for (let each = element; each; each = each.parentElement) {
    const { backgroundColor } = getComputedStyle(each);
    if (!/^rgba\(.*, [\d.]+\)$|^transparent$/.test(backgroundColor)) return backgroundColor;
  }
  return "#fff";
}
