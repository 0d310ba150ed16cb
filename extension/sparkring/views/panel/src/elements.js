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

// Return a drawing with an empty path. CSS may stretch it.
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
