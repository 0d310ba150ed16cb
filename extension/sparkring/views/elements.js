// Small things that every part of the panel needs. The parts are joined to one module in the order that panel.py names.

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

// 0–3, 7: three or more in a row as a range.
function rankNumbers(ranks) {
  const spans = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = spans[spans.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  return spans.map(([a, b]) => (b - a > 1 ? `${a}–${b}` : b > a ? `${a}, ${b}` : `${a}`)).join(", ");
}
