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
